"""Data parallelism: several engine replicas with the interface of one engine.

engine.py    the replicas, each with a pool and a thread
"""
