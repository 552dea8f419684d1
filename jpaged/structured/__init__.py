"""What a caller may ask of the text that is generated: a grammar, in the forms that vLLM takes. No grammar library.

outputs.py  StructuredOutputs: one constraint, and how JSON is written
"""

from jpaged.structured.outputs import MAX_CHOICES, MAX_GRAMMAR_BYTES, Kind, StructuredOutputs

__all__ = ["MAX_CHOICES", "MAX_GRAMMAR_BYTES", "Kind", "StructuredOutputs"]
