"""One executor across several processes, one on each host.

handshake.py   the processes join, compare options, watch each other, end together
arrivals.py    incoming connections of other processes and of strangers
secret.py      mutual proof of knowledge of the cluster's secret
channel.py     messages between two processes
heartbeats.py  heartbeats between processes
messages.py    message formats while serving
executor.py    process 0 broadcasts each verb, the others run what they receive
shards.py      an array over several processes, as the parts of this process
"""
