"""One executor across several processes, one on each host.

handshake.py   the processes connect and join, compare options, watch each other, end together
channel.py     messages between two processes, and mutual proof of knowledge of the cluster's secret
heartbeats.py  heartbeats between processes
executor.py    message formats; process 0 broadcasts each verb, the others run what they receive
"""
