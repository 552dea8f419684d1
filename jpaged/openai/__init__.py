"""OpenAI's formats, for whoever speaks them: a batch file, an HTTP face. No I/O, no gRPC, no engine.

bodies.py   what a body of completions or of a chat asks for
neutral_fields.py  fields of other servers, and the values with which they change nothing
chats.py    what chats have beside: messages, tools, reasoning, and answers as messages
choices.py  whole answers to completions and chats
chunks.py   the same as they come: chunks of a stream
scoring.py  bodies of /v1/score and /v1/embeddings
tokens.py   bodies of /tokenize and /detokenize
responses/  bodies of /v1/responses, whole and as events
lines.py    the batch file: lines, and what is around their bodies
answers.py  one line -> one line of output, by whatever completes, scores and embeds
"""
