"""Bodies of /v1/responses, whole and as events. Stateless: a conversation is sent whole with each call. No I/O.

asking.py  what a body asks for: a chat in other words
items.py   items of an input -> messages of a chat
answers.py a response, whole
events.py  a response as it comes
"""
