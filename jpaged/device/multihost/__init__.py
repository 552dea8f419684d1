"""One executor in several processes, one on each host.

handshake.py   the processes meet, agree, watch each other, end together
arrivals.py    other processes as they come, and strangers
secret.py      whether the other end knows the cluster's secret
channel.py     messages between two of them
heartbeats.py  signs of life between them
messages.py    what they say while they serve
executor.py    process 0 says each verb, the others run what they hear
shards.py      an array over several processes, as what this one has of it
"""
