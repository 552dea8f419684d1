"""jpaged.v1.PrefixService: transfer of prefixes to and from other servers.

servicer.py   the methods
wire.py       proto <-> header and pieces
peers.py      servers that this one fetches from
"""
