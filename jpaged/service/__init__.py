"""What any face of the server needs, whatever its protocol: requests in, streams out. It knows no grpc.

service.py         the verbs: admit, generate, tokenise, abort, pin, load adapters
state.py           where a service is in its life
streams.py         events -> messages: from the engine's thread to the readers, within a budget
workers.py         threads for what grows with a request
loaded_model.py    the model that serves: engine, input processor, tokenizer, facts
adapters.py        adapters (LoRA) by name
names.py           what a caller may call something
auditing.py        what the audit learns of each request
records.py         what became of each call, for traces and logs
evaluations.py     calls that score and embed
scoring.py         scores and embeddings as requests
continuing.py      requests that go on behind what was generated elsewhere
input_processor.py what a caller sends -> a request that can run
roles/             prefill and decode on servers of their own
tokenizing/        texts to tokens
chat/              chat templates, in a process of their own
grammars/          constraints on what is generated, compiled and followed
"""
