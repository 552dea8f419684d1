"""Data parallelism: several engine replicas with the interface of one engine.

engine.py    the replicas, each with a pool and a thread
entrance.py  submission of requests, and reservations for requests that come later
routing.py   selection of the replica for a request
"""
