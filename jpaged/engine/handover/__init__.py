"""Prompts that are computed on one engine and go on on another.

handover.py  what any thread may ask of it
keys.py      what the blocks of a prompt are known by
"""
