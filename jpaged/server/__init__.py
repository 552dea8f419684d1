"""The gRPC server: proto in, proto out. It knows the engine's face and nothing below it.

serving.py     what the server needs of the loaded model: engine, intake, tokenizer, facts
port.py        gRPC's server, which takes whatever peers send
servicer.py    one method for each RPC
wire.py        proto <-> types
status.py      errors -> status codes with details
freed_memory.py  memory of large requests, given back
workers.py     threads for what grows with a request
stream.py      the engine's thread -> asyncio
metrics.py     what Prometheus is told
replica.py     a loaded model without a port, for a host with a server of its own
health.py      grpc.health.v1, whose watches end with the server
lifecycle.py   health, signals: starting, serving, draining, exit code
"""
