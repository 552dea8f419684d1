"""Prefill and decode on servers of their own, against two servers that do both.

__main__.py    the measurement and its table
servers.py     the processes
transports.py  rates of transfers over gRPC and over data ports
load.py        what is asked of them, and what their clients saw
"""
