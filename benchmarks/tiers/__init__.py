"""Prefixes that come back from disk, measured, and servers that are killed beside them.

kills.py   `python -m benchmarks.tiers.kills`: a server that is killed at random moments, again and again
"""
