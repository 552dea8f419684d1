"""Structured output: constraints on generated text, in vLLM's forms. Independent of the grammar library.

outputs.py  StructuredOutputs: one constraint, and the formatting of JSON
grammar.py  interface of a compiled grammar for the engine, and thinking budgets as grammars
"""

import warnings
from typing import TYPE_CHECKING, Any

from jpaged.structured.grammar import (
    Grammar,
    GrammarBatch,
    GrammarMasks,
    GrammarState,
    StatesOneByOne,
    TagTexts,
    ThinkingBudget,
    ThinkingGrammar,
)
from jpaged.structured.outputs import (
    JSON_WHITESPACE,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    ConstraintKind,
    StructuredOutputs,
    get_response_format,
    get_structured_outputs,
)

__all__ = [
    "JSON_WHITESPACE",
    "MAX_CHOICES",
    "MAX_GRAMMAR_BYTES",
    "ConstraintKind",
    "Grammar",
    "GrammarBatch",
    "GrammarMasks",
    "GrammarState",
    "StatesOneByOne",
    "StructuredOutputs",
    "TagTexts",
    "ThinkingBudget",
    "ThinkingGrammar",
    "get_response_format",
    "get_structured_outputs",
]


_FORMER_NAMES = {
    "Kind": "ConstraintKind",
}
"""Public names of the previous release. They go with the next one."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _FORMER_NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warnings.warn(f"{__name__}.{name} is now {_FORMER_NAMES[name]}", DeprecationWarning, stacklevel=2)
        return globals()[_FORMER_NAMES[name]]
