"""`jpaged bench fleet`: a day of requests on many replicas, each the real engine in simulated time.

day.py           the conversations of a day, the tokens of their prompts, and messages to replicas
replica.py       one replica with its executor, and worker processes of several replicas
routing.py       selection of the replica for a request
topology.py      kinds of replicas: devices, prices, start-up times; their states and cost
fleet.py         the coordinator: windows of time, failures, drains; estimated duration
outcomes.py      results of a day, and their plots
autoscaler.py    the horizontal pod autoscaler, as deploy/ configures it
"""
