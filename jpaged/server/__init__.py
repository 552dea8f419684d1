"""The gRPC frontend: proto in, proto out. It uses the service and nothing below it.

port.py         gRPC server that tolerates any input from peers
binding.py      its address, with TLS if there are certificates
door.py         interceptor: authorizes the calls of a port
servicer.py     proto <-> types, and one method for each RPC
chat.py         proto <-> types of chats
prefill.py      prefill for servers of the decode role
evaluations.py  Score and Embed
status.py       errors -> status codes with details
replica.py      a loaded model without a port, for a host with its own server
health.py       grpc.health.v1, whose watches end with the server
progress.py     watchdog of the engine: stalls, hangs
probes.py       a port only for health, of any process
lifecycle.py    health, signals: starting, serving, draining, exit code
faces/          third-party gRPC APIs on the same port
"""
