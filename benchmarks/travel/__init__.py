"""A prompt whose prefix another server has: fetched from there, against computed anew.

__main__.py   the measurement and its table
servers.py    two servers, and what streams at them see
"""
