"""A router: the same gRPC API in front of many servers. Neither an engine nor jax.

router.py      its port and its life
methods.py     the methods: how each is answered, and as what it goes on
relay.py       calls that one server answers; a stream goes on elsewhere when its server is gone
fleetwide.py   calls about all servers: load, adapters, who runs a request
acts.py        what all servers have to keep: pins, adapters
fleet.py       the servers: their health, their model, who takes calls; what is counted of them
targets.py     how they are named: words, a file, DNS
prefixes.py    the beginnings of a prompt as hashes, without tokens
directory.py   which server has which beginning; where a prompt goes
telling.py     where servers tell which prefixes they hold
held.py        what they tell
replicas.py    where a prompt goes among servers that somebody else calls
callers.py     whose a call is, what of it goes on, and what comes back
metrics.py     what is counted, for Prometheus
"""
