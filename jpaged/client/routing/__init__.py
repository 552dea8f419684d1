"""Choice of a server per call, retries, and streams that resume on another server.

endpoints.py         the servers: availability, load, choice for the next call: no I/O
retry.py             retry rules, and the trace context of calls: no I/O
resumable_stream.py  one request, on one or more servers: no I/O
servers.py           calls of a `Client` on threads, and of an `AsyncClient` in tasks, which share calls
"""
