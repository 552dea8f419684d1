"""/v1/files and /v1/batches: files of requests on disk, run in addition to interactive requests, across restarts.

values.py  a stored file, a batch: as stored, and as OpenAI's API returns them
store.py   both on disk, separately per tenant, bounded
lines.py   the lines of an input, and the lines of output
pacing.py  number of lines that may run now without delaying interactive requests
threads.py threads for disk I/O
running.py one batch from its first line to its last
runner.py  all unfinished batches, resumed when the server starts
pages.py   paginated lists
files.py   the paths under /v1/files
batches.py the paths under /v1/batches
"""
