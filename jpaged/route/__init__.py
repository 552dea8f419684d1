"""A router: the same gRPC API, forwarded to many servers. Neither an engine nor jax.

router.py      its port and lifecycle
methods.py     the RPC methods: how each is forwarded
relay.py       calls answered by one server; streams resume on another server if theirs fails
fleetwide.py   calls about all servers: load, adapters, abort
acts.py        replicated control calls: pins, adapters
fleet.py       the backend servers: health, model, admission, counts
targets.py     how servers are named: options, a file, DNS
prefixes.py    the beginnings of a prompt as hashes, without tokens
directory.py   table of servers by prompt beginning; placement of prompts
telling.py     addresses of the servers' KV events
held.py        index of KV events: the prefixes that servers hold
replicas.py    placement for servers that another program calls
callers.py     metadata and tenants of calls, and statuses of responses
metrics.py     metrics for Prometheus
"""
