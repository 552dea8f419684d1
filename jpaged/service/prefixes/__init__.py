"""Prefixes that travel between servers, whatever the protocol.

likeness.py     whether a block means the same here as where it comes from
parts.py        what goes over a wire: a header, and pieces of blocks
receiving.py    pieces -> blocks, each held to its tokens and its hash
travelling.py   save, load and fetch
"""
