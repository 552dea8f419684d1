"""The gRPC face: proto in, proto out. It knows the service and nothing below it.

port.py         gRPC's server, which takes whatever peers send
binding.py      its address, with TLS where there are certificates
door.py         who is let in at a port
servicer.py     proto <-> types, and one method for each RPC
chat.py         proto <-> types of chats
prefill.py      prompts for servers that go on from them
evaluations.py  Score and Embed
status.py       errors -> status codes with details
replica.py      a loaded model without a port, for a host with a server of its own
health.py       grpc.health.v1, whose watches end with the server
progress.py     whether the engine gets on: stalls, hangs
probes.py       a port for health alone, of any process
lifecycle.py    health, signals: starting, serving, draining, exit code

faces/          services that others have published, on the same port
"""
