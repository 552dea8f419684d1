"""Third-party gRPC APIs on the same port: their messages in, calls of the service, their messages out.

faces.py        the enabled APIs of a port, their names, and the end of their calls at shutdown
completing.py   runs a request to the end, and measures the result
naming.py       errors that name the fields of third-party messages
descriptors.py  reflection of services whose messages are in several pools
open_inference/  inference.GRPCInferenceService, for clients of KServe and Triton
vllm_engine/     vllm.grpc.engine.VllmEngine, for gateways
"""
