"""Inspection of the KV pool for the dashboard. Free while no viewer is connected.

watch.py  records events of blocks, and takes snapshots between two steps
"""
