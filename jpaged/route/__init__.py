"""A router: the same gRPC API, forwarded to many servers. Neither an engine nor jax. An optional part.

router.py          its port, lifecycle and metrics
methods.py         the RPC methods: how each is forwarded; metadata, tenants and statuses of calls
relay.py           calls answered by one server; streams resume on another server if theirs fails
fleet.py           the backend servers: health, model, admission, counts
targets.py         how servers are named: options, a file, DNS
aggregate.py       calls about all servers: load, pins, adapters, abort
prefix_table.py    table of servers by prompt beginning; placement of prompts, also for other programs
cli.py             the command
kv_event_index.py  index of KV events: the prefixes that servers hold, and the events' addresses
"""
