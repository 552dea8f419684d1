"""Inspection of the KV pool for the dashboard. Free while no viewer is connected.

eyes.py   thread-safe inspector of the pools
watch.py  records events of blocks, and takes snapshots between two steps
"""
