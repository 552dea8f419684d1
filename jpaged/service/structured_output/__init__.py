"""Grammars of structured output, by llguidance: compiled within limits, cached, and advanced token by token.

compiler.py             constraints -> grammars, off the event loop, each once; the cache; states; masks of a batch
sources.py              a constraint as the library's source, and its errors in the caller's terms
ebnf.py                 EBNF -> Lark
sandbox.py              limits, and the child process that tries a grammar before the server compiles it
vocabulary.py           a tokenizer as grammars see it
budgeted_completion.py  completes a text when few tokens are left
"""
