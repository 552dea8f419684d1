"""Blocks on local disk, found again by their keys after whatever end: files and bytes, no engine and no arrays.

folder.py    the folder: whose it is, how much is in it, what is old there
segment.py   one file of slots, and the table of their headers
slots.py     which slot has which key
store.py     key -> block, written and read by any thread
"""
