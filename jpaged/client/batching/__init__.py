"""Parts of `jpaged.client.batch`.

targets.py   several servers of one model that share the lines
parquet.py   Parquet as input and output
"""
