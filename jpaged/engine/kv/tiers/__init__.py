"""Where cached prefixes are kept that the device's pool has no room for, and how they come and go.

host.py       in host memory
chain.py      what a prefix is called that travels
leaving.py    one that is read for another server
arriving.py   one that comes from there
travels.py    what may be asked of both, by any thread
travelling.py prompts that go on elsewhere: what is held of them, and how long
"""
