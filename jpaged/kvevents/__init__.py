"""KV cache events: which server caches which prefixes, in the format of vLLM's KV events.

encoding.py    events of a step <-> a message
publisher.py   sockets of a server, on a thread
subscriber.py  sockets of a router: in order, with replay of missed messages
directory.py   index of servers by cached prefix: no I/O
"""
