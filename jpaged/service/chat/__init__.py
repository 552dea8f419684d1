"""Chats: templates, a model's own programs, run where they can hold nobody up; and what answers say.

template.py    a template and its limits: messages in, text out
messages.py    a conversation as a caller sends it: checked, and as templates expect it
variables.py   which variables a template uses
process.py     the child that renders, kept warm; ended and started again when a template passes a limit
frames.py      what travels between the two
__main__.py    the child: `python -m jpaged.service.chat`
parsers/       answers -> content, reasoning and tool calls
answering.py   how one model's chats are answered: what holds an answer, and what reads it
answers.py     the answers of one chat, told apart while they come
structural_tag.py  what holds an answer to a family's format of calls
"""
