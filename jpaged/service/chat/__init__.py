"""Chat templates and chat answers. Templates are programs that come with a model, so they run in a child process.

template.py    a template and its limits: messages in, text out
messages.py    a conversation as a caller sends it: checked, and as templates expect it
variables.py   the variables that a template uses
process.py     the child that renders, kept warm; ended and restarted if a template passes a limit
frames.py      messages between the server and the child
__main__.py    the child: `python -m jpaged.service.chat`
parsers/       answers -> content, reasoning and tool calls
answering.py   constraints and parsers of one model's chat answers
answers.py     the answers of one chat, split into content, reasoning and calls while they stream
structural_tag.py  the constraint that forces a family's tool-call format
"""
