"""Offload of cached prefixes beyond the device pool, and transfer to other servers.

host.py       host memory tier
nearing.py    prefetch from host memory to the device, for a waiting prompt
chain.py      block hashes of a prefix that is transferred
leaving.py    export of a prefix to another server
arriving.py   import of a prefix from another server
travels.py    thread-safe front end of export and import
disk.py       local disk tier
spilling.py   background writes to disk
fetching.py   asynchronous reads from disk while groups wait
bringing.py   missing blocks of a waiting prompt, and their insertion into the prefix cache
staging.py    host memory buffers for disk transfers
threads.py    disk I/O threads
told.py       KV cache events of the disk tier
"""
