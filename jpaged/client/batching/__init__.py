"""What `jpaged.client.batch` stands on beside the file formats.

answers.py   one line -> one line of output, by whatever completes, scores and embeds
scoring.py   bodies of /v1/score and /v1/embeddings: what they ask for, and what is answered. No I/O
targets.py   several servers of one model that share the lines
parquet.py   Parquet as input and output
"""
