"""Bodies of /v1/responses, whole and as events. Stateless: a conversation is sent whole with each call. No I/O.

asking.py  body -> chat
items.py   items of an input -> messages of a chat
answers.py whole responses
events.py  streamed responses
"""
