"""Grammars of structured output, by llguidance: compiled within limits, cached, and advanced token by token.

compiler.py        constraints -> grammars, off the event loop, each once; the cache; grammars of a served model
sources.py         a constraint as the library's source, and its errors in the caller's terms
schemas.py         JSON schemas: conversion for the library, and locations of errors
ebnf.py            EBNF -> Lark
structural_tags.py free text with constrained parts -> Lark
limits.py          resource limits of a grammar
trial_process.py   the child process that tries a grammar before the server compiles it
trial.py           the work of that process
__main__.py        the child: `python -m jpaged.service.grammars`
vocabulary.py      a tokenizer as grammars see it
state.py           the state of one sequence in its grammar
masks.py           masks of a whole batch
closing.py         completes a text when few tokens are left
completions.py     search for completions
"""
