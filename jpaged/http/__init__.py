"""The HTTP frontend: OpenAI's API with JSON and server-sent events. It uses the service and nothing below it.

app.py      the application: routes and middleware
access.py   authentication of requests
port.py     uvicorn on the event loop of the server
connections.py  limits of connections and idle times
errors.py   errors -> statuses and OpenAI's error objects
requests.py common parts of requests: bounded body, id, tenant
operator.py health, version, metrics
models.py   /v1/models
tokens.py   /tokenize, /detokenize
scoring.py  /v1/embeddings, /v1/score
local.py    in-process client for OpenAI's bodies
page/       /, the dashboard of the KV pool
exchange.py JSON bodies in and out, on threads if large
responses.py /v1/responses
batching/   /v1/files, /v1/batches
generate/   /v1/completions, /v1/chat/completions
"""
