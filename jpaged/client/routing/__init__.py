"""Which server runs a request, and how one goes on elsewhere when its server is gone.

progress.py   what a stream has told so far
"""
