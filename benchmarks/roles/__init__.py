"""Prefill and decode on servers of their own, against two servers that do both.

__main__.py    the measurement and its table
servers.py     the processes
fleet.py       `make fleet`: a fleet over each transport, and with a killed master
transports.py  rates of transfers over gRPC and over data ports
load.py        what is asked of them, and what their clients saw
"""
