"""What generates: /v1/completions and /v1/chat/completions, in one piece or as it comes.

paths.py   the two paths
asked.py   what one HTTP request asks for, once its body is read
calls.py   a job as requests of the service: their events, or what came of them; texts of tokens
events.py  server-sent events, and clients that leave
"""
