"""`jpaged bench fleet`: a day of requests on many replicas, each the real engine in simulated time.

day.py           the conversations of a day: curve, bursts, tenants, turns
prompts.py       the tokens of their prompts
attempts.py      messages to and from replicas
executor.py      the simulator's executor, with several steps per dispatch if the result is the same
replica.py       one replica, simulated up to a given time
worker.py        a subset of the replicas, in a separate process
routing.py       selection of the replica for a request
pods.py          states of the replicas, and their cost
topology.py      kinds of replicas: devices, prices, start-up times
fleet.py         the coordinator: windows of time, failures, drains
forecast.py      estimated duration of a simulation
outcomes.py      results of a day
pictures.py      plots of the results
scaling/         the horizontal pod autoscaler
"""
