"""Persistent block store on local disk, by block key: files and bytes, without engine or arrays.

folder.py   folder: lock, size limit, removal of old files
segment.py  one file of slots, and the table of their headers
store.py    thread-safe store from key to block, and its index from key to slot
"""
