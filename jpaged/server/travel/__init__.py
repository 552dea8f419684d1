"""jpaged.v1.PrefixService: prefixes that come from other servers and go there.

servicer.py   the methods
wire.py       proto <-> header and pieces
peers.py      servers that this one fetches from
"""
