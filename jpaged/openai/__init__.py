"""OpenAI's formats, for whoever speaks them: a batch file, an HTTP face. No I/O, no gRPC, no engine.

lines.py    completions and chats: what a body asks for, and what it is answered with; the batch file around them
chats.py    what chats have beside: messages, tools, reasoning, and answers as messages
scoring.py  bodies of /v1/score and /v1/embeddings
tokens.py   bodies of /tokenize and /detokenize
answers.py  one line -> one line of output, by whatever completes, scores and embeds
"""
