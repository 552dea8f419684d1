"""Choice of a server per call, retries, and streams that resume on another server.

endpoints.py  the servers: availability, load, choice for the next call: no I/O
traces.py     trace context of calls
tries.py      retry rules: no I/O
course.py     one request, on one or more servers: no I/O
progress.py   the output of a stream so far
threads.py    calls of a `Client`
tasks.py      calls of an `AsyncClient`
"""
