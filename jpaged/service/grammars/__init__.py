"""Grammars of constraints, by llguidance: compiled within bounds, kept, and followed token by token.

compiler.py        constraints -> grammars, off the event loop, each once; the cache; those of a served model
sources.py         a constraint in the library's words, and its errors in the constraint's
schemas.py         JSON schemas: how they are given to the library, and where they fail
ebnf.py            EBNF -> Lark
structural_tags.py free text with constrained parts -> Lark
limits.py          how much a grammar may take
trial_process.py   the process that tries a grammar before the server compiles it
trial.py           what that process does
__main__.py        the child: `python -m jpaged.service.grammars`
vocabulary.py      a tokenizer as grammars see it
state.py           where one sequence is in its grammar
masks.py           masks of a whole batch
closing.py         a text is whole when few tokens are left
completions.py     ways to end
"""
