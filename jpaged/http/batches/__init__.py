"""/v1/files and /v1/batches: files of requests on disk, run in addition to interactive requests, across restarts.

routes.py  the paths under /v1/files and /v1/batches
store.py   files and batches on disk, separately per tenant, bounded
job.py     one batch from its first line to its last; all unfinished batches, resumed when the server starts
"""
