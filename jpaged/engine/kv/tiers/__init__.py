"""Where cached prefixes are kept that the device's pool has no room for, and how they come and go.

host.py       in host memory
nearing.py    from there to the device, for a prompt that waits, in parts
chain.py      what a prefix is called that travels
leaving.py    one that is read for another server
arriving.py   one that comes from there
travels.py    what may be asked of both, by any thread
disk.py       on local disk
spilling.py   on their way to disk
fetching.py   on their way back, while their groups wait
bringing.py   what a waiting prompt misses, and how it comes to be cached
staging.py    host memory that they pass through
threads.py    who waits for the disk
told.py       what is told of blocks there
"""
