"""vllm.grpc.engine.VllmEngine, from the published messages: gateways tokenize, and read tokens, not text.

servicer.py   a method for each RPC
request.py    a GenerateRequest -> prompt and parameters
responses.py  events of a request -> chunks and ends of sequences
facts.py      the model, the server and its load
tokenizer.py  the files of a model's tokenizer, in a zip
"""
