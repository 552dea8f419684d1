"""Protocol-independent core of the server: requests in, output streams out. Does not import grpc.

service.py         the operations: admit, generate, tokenize, abort, pin, load adapters
state.py           lifecycle state of a service
streams.py         events -> messages: from the engine thread to the readers, within a byte budget
workers.py         threads for work that grows with a request
loaded_model.py    the served model: engine, input processor, tokenizer, properties
adapters.py        adapters (LoRA) by name
names.py           validity checks for names that callers choose
auditing.py        notes each request in the audit log
records.py         record of each call, for traces and logs
evaluations.py     calls that score and embed
scoring.py         scores and embeddings as requests
continuing.py      requests that resume after tokens generated on another server
input_processor.py a caller's input -> a request that can run
roles/             disaggregated prefill and decode servers
tokenizing/        text -> tokens
chat/              chat templates, rendered in a child process
grammars/          structured output: grammars, compiled and advanced per token
"""
