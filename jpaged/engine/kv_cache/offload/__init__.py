"""Offload of cached prefixes beyond the device pool, and transfer to other servers.

host.py            host memory tier
host_prefetch.py   prefetch from host memory to the device, for a waiting prompt
transfer.py        export of a prefix to another server
connector_tier.py  tier below host memory, over a KV connector or local disk
mooncake.py        KV connector over Mooncake Store, whose memory a fleet shares
"""
