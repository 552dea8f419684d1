"""The HTTP face: OpenAI's API. JSON in, JSON and server-sent events out; it knows the service and nothing below it.

app.py      the routes
access.py   who is let in: keys, and what needs none
port.py     uvicorn on the event loop of the server
connections.py  their number, and how long they may do nothing
errors.py   errors -> statuses and OpenAI's form of them
requests.py what every request has: its body, bounded; its id, its tenant
operator.py what is asked of the server and not of the model: health, version, metrics
models.py   /v1/models
tokens.py   /tokenize, /detokenize
scoring.py  /v1/embeddings, /v1/score
local.py    the server of this process as what runs OpenAI's bodies
page/       /, the page of the pool
exchange.py a JSON body in and out, on threads where it is large
responses.py /v1/responses
batching/   /v1/files, /v1/batches
generate/   /v1/completions, /v1/chat/completions
"""
