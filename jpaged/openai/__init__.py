"""OpenAI's formats, for batch files and the HTTP frontend. No I/O, no gRPC, no engine.

bodies.py   bodies of completions and chats
neutral_fields.py  fields of other servers, and their values without effect
chats.py    fields of chats: messages, tools, reasoning; answers as messages
choices.py  whole answers to completions and chats
chunks.py   streamed answers: chunks
scoring.py  bodies of /v1/score and /v1/embeddings
tokens.py   bodies of /tokenize and /detokenize
responses/  bodies of /v1/responses, whole and as events
lines.py    the batch file: lines, and the fields around their bodies
answers.py  one line -> one line of output, run on any server
"""
