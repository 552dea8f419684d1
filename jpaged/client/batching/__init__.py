"""What `jpaged.client.batch` stands on beside the file formats.

targets.py   several servers of one model that share the lines
parquet.py   Parquet as input and output
"""
