"""Structured output: constraints on generated text, in vLLM's forms. Independent of the grammar library.

outputs.py  StructuredOutputs: one constraint, and the formatting of JSON
grammar.py  interface of a compiled grammar for the engine, and thinking budgets as grammars
"""

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
    Kind,
    StructuredOutputs,
    response_format_of,
    structured_outputs_of,
)

__all__ = [
    "JSON_WHITESPACE",
    "MAX_CHOICES",
    "MAX_GRAMMAR_BYTES",
    "Grammar",
    "GrammarBatch",
    "GrammarMasks",
    "GrammarState",
    "Kind",
    "StatesOneByOne",
    "StructuredOutputs",
    "TagTexts",
    "ThinkingBudget",
    "ThinkingGrammar",
    "response_format_of",
    "structured_outputs_of",
]
