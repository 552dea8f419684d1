"""Third-party gRPC APIs on the same port: their messages in, calls of the service, their messages out.

faces.py                   the enabled APIs of a port, their names, and the end of their calls at shutdown; reflection
calls.py                   runs a request to the end, measures the result; errors that name third-party fields
open_inference.py          inference.GRPCInferenceService, for clients of KServe and Triton
open_inference_request.py  its requests: tensors and parameters -> a parsed request
vllm_engine.py             vllm.grpc.engine.VllmEngine, for gateways
"""
