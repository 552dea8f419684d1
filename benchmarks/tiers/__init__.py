"""Prefixes that come back from disk, measured, and servers that are killed beside them.

__main__.py   `python -m benchmarks.tiers`: times to first token from each tier, and what running streams notice
server.py     one life of a server, and what is asked of it
pages.py      the kernel's page cache: files read into it, and dropped from it
table.py      what came of it, in Markdown
kills.py      `python -m benchmarks.tiers.kills`: a server that is killed at random moments, again and again
"""
