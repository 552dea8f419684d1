"""Other servers of ours, as a server asks them: a client of its own, on its event loop.

prefill.py   servers that compute prompts
"""
