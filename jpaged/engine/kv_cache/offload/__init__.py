"""Offload of cached prefixes beyond the device pool, and transfer to other servers.

host.py            host memory tier
transfer.py        export of a prefix to another server
connector_tier.py  tier below host memory, over a KV connector or local disk
mooncake.py        KV connector over Mooncake Store, whose memory a fleet shares
"""
