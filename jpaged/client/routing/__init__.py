"""Which server runs a call, and how a stream goes on elsewhere when its server is gone.

endpoints.py  the servers: which are there, how busy they are, which one is next: no I/O
traces.py     the trace that a call belongs to
tries.py      which failures are tried again, and how often: no I/O
course.py     one request, on as many servers as it takes: no I/O
progress.py   what a stream has told so far
threads.py    calls of a `Client`
tasks.py      calls of an `AsyncClient`
"""
