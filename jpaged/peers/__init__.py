"""Clients of other jpaged servers, on a server's event loop.

prefill.py   servers that compute prompts
"""
