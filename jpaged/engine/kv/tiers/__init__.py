"""Where cached prefixes are kept that the device's pool has no room for.

host.py   in host memory
"""
