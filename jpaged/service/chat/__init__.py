"""Chat templates: a model's own program, run where it can hold nobody up.

template.py    a template and its limits: messages in, text out
process.py     the child that renders, kept warm; ended and started again when a template passes a limit
frames.py      what travels between the two
__main__.py    the child: `python -m jpaged.service.chat`
"""
