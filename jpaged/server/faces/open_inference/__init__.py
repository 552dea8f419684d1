"""The Open Inference Protocol: requests and responses are tensors, named as vLLM's backend for Triton names them.

servicer.py    a method for each RPC
stream.py      many requests on one call, side by side
request.py     a ModelInferRequest -> what is asked
parameters.py  parameters of a request -> SamplingParams
responses.py   what came of a request -> ModelInferResponse
tensors.py     elements of a tensor, as bytes or in the field of their type
model.py       what is told of the model: its tensors
"""
