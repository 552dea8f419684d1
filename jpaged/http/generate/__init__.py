"""Generation: /v1/completions and /v1/chat/completions, as a whole or streamed.

paths.py   the two paths
asked.py   one HTTP request after its body is parsed
calls.py   the requests of a job: their events or outputs; texts of tokens
events.py  server-sent events, and disconnects of clients
"""
