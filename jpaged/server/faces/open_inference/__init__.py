"""The Open Inference Protocol: requests and responses are tensors, named as in vLLM's backend for Triton.

servicer.py    a method for each RPC
stream.py      concurrent requests on one call
request.py     a ModelInferRequest -> a parsed request
parameters.py  parameters of a request -> SamplingParams
responses.py   results of a request -> ModelInferResponse
tensors.py     elements of a tensor, as bytes or in the typed field
model.py       the model's tensors and configuration
"""
