"""The HTTP frontend: OpenAI's API with JSON and server-sent events. It uses the service and nothing below it.

app.py          the application: routes, authorization; health, version, metrics, /v1/models
port.py         uvicorn on the event loop of the server
connections.py  limits of connections and idle times
exchange.py     bounded bodies in and out, on threads if large; errors -> statuses and OpenAI's error objects
completions.py  /v1/completions, /v1/chat/completions
responses.py    /v1/responses
embeddings.py   /v1/embeddings, /v1/score, /tokenize, /detokenize; in-process client for OpenAI's bodies
batches/        /v1/files, /v1/batches
"""
