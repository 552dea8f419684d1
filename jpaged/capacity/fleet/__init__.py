"""`jpaged bench fleet`: a day of requests on many replicas, each the real engine in simulated time.

day.py           the conversations of a day: curve, bursts, tenants, turns
prompts.py       the tokens of their prompts
attempts.py      what goes to replicas and comes back
executor.py      the simulator's executor, several steps at once where that changes nothing
replica.py       one replica, brought forward to a time
worker.py        some of the replicas, in a process of their own
routing.py       which replica a request goes to
pods.py          who takes requests, begins or ends, and what that costs
topology.py      kinds of replicas: devices, prices, starts
fleet.py         the coordinator: windows of time, failures, drains
forecast.py      what a simulation will take
outcomes.py      what a day came to
pictures.py      the same drawn
scaling/         the horizontal pod autoscaler
"""
