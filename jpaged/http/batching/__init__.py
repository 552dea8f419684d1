"""/v1/files and /v1/batches: files of requests on disk, run beside what callers wait for, across restarts.

values.py  a stored file, a batch: as they are kept, and as OpenAI's API shows them
store.py   both on disk, each tenant's apart, bounded
lines.py   the lines of an input, and what is written of each
pacing.py  how many lines may run now, so that nobody who waits for an answer waits longer
threads.py threads that wait for the disk
running.py one batch from its first line to its last
runner.py  all batches that have not ended, taken up when the server starts
pages.py   lists in pages
files.py   the paths under /v1/files
batches.py the paths under /v1/batches
"""
