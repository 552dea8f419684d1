"""OpenAI's formats, for batch files and the HTTP frontend. No I/O, no gRPC, no engine.

request.py         bodies of completions and chats; fields of other servers, and their values without effect
chat_tools.py      tools and calls of chats in other forms
response.py        answers to completions and chats, whole and as chunks
responses.py       bodies of /v1/responses, whole and as events
response_input.py  their items and tools as messages and functions of a chat
embeddings.py      bodies of /v1/embeddings, /v1/score, /tokenize and /detokenize
lines.py           the batch file: lines, the fields around their bodies, and one line -> one line of output
"""
