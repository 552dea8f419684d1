"""Which server holds which prefixes: told by servers, gathered by routers, in the format of vLLM's KV events.

encoding.py    changes of a step <-> a message
publisher.py   a server's sockets, on a thread
subscriber.py  a router's sockets: in order, with what it missed asked for again
directory.py   who holds how much of a prompt: no I/O
"""
