"""The gRPC frontend: proto in, proto out. It uses the service and nothing below it.

grpc_server.py  gRPC server that tolerates any input from peers: address, authorization, errors -> statuses
servicer.py     proto <-> types, and one method for each RPC
kv_transfer.py  transfer of prefixes to and from other servers, and prefill for servers of the decode role
replica.py      a loaded model without a port, for a host with its own server
health.py       grpc.health.v1: on the port, whose watches end with the server, and on a port of its own
lifecycle.py    health, signals: starting, serving, draining, exit code; watchdog of the engine; the control service
compat/         third-party gRPC APIs on the same port
"""
