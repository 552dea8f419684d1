"""Transfer of prefixes between servers, independent of the protocol.

likeness.py     check that the KV blocks of both servers are interchangeable
parts.py        the messages: a header, and pieces of blocks
receiving.py    pieces -> blocks, each verified against its tokens and its hash
travelling.py   save, load and fetch
"""
