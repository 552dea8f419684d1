"""Structured output: constraints on generated text, in vLLM's forms. Independent of the grammar library.

outputs.py  StructuredOutputs: one constraint, and the formatting of JSON
grammar.py  interface of a compiled grammar for the engine, and thinking budgets as grammars
"""

from typing import TYPE_CHECKING

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
from jpaged.version import alias_names

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
    __getattr__ = alias_names(__name__, _FORMER_NAMES)
