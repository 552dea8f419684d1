"""The HTTP frontend: APIs of OpenAI, Anthropic and Ollama, in JSON and events. It uses only the service.

app.py          the application: routes, authorization; health, version, metrics, /v1/models
port.py         uvicorn on the event loop of the server; limits of connections and idle times
exchange.py     bounded bodies in and out, on threads if large; errors -> statuses and error objects of either API
completions.py  /v1/completions, /v1/chat/completions
responses.py    /v1/responses, /v1/messages
response_store.py  responses that are kept, or run in the background
ollama.py       /api/chat, /api/generate, /api/embed and Ollama's facts about the model
embeddings.py   /v1/embeddings, /v1/score, /pooling, /tokenize, /detokenize; in-process client for OpenAI's bodies
batches/        /v1/files, /v1/batches
"""
