"""Services that others have published, on the gRPC port: their messages in, calls of our service, their messages out.

faces.py        which of them a port has, their names, and how their calls end with the server
completing.py   a request read to its end, and how much there is to tell of it
naming.py       errors that name the fields of others' messages
descriptors.py  what reflection tells of services whose messages are in several pools

open_inference/  inference.GRPCInferenceService, which KServe's and Triton's clients speak
vllm_engine/     vllm.grpc.engine.VllmEngine, which gateways speak
"""
