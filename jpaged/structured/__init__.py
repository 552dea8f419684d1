"""What a caller may ask of the text that is generated: a grammar, in the forms that vLLM takes. No grammar library.

outputs.py  StructuredOutputs: one constraint, and how JSON is written
grammar.py  what a compiled one does for the engine
thinking.py budgets of thinking, as grammars
"""

from jpaged.structured.grammar import Grammar, GrammarBatch, GrammarMasks, GrammarState, StatesOneByOne
from jpaged.structured.outputs import (
    JSON_WHITESPACE,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    Kind,
    StructuredOutputs,
    response_format_of,
    structured_outputs_of,
)
from jpaged.structured.thinking import TagTexts, ThinkingBudget, ThinkingGrammar

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
