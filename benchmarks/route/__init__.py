"""What a router costs: processor time a token, and memory a stream. Servers only speak, and callers only read.

__main__.py  the measurement
server.py    a server without a model: streams at a rate
callers.py   streams that are read
"""
