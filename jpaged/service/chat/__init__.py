"""Chat templates and chat answers. Templates are programs that come with a model, so they run in a child process.

template.py       a conversation: checked; rendered by a model's template, within limits
sandbox.py        the child that renders, kept warm; ended and restarted if a template passes a limit
__main__.py       the child: `python -m jpaged.service.chat`
output_config.py  constraints and parsers of one model's chat answers
formats.py        the families' formats by name; detects a model's format from its template
tool_parser.py    parsers of calls as JSON objects, and the base of all parsers
markup_parser.py  parsers of calls in tags or with literals; what differs between families is data
output_parser.py  the answers of one chat, split into content, reasoning and calls while they stream

Parsers are incremental. The concatenated pieces do not depend on how the text is split. A parser emits no character
twice, and holds back only text that may still become a tag.
"""
