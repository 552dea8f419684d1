"""Attention over keys and values that lie in blocks; `paged_attention` is the operation."""

from jpaged.kernels.paged_attention.api import paged_attention, paged_attention_update
from jpaged.kernels.paged_attention.backends import Backend, Choice, choose
from jpaged.kernels.paged_attention.spec import AttentionSpec, Queries, RaggedRows

__all__ = [
    "AttentionSpec",
    "Backend",
    "Choice",
    "Queries",
    "RaggedRows",
    "choose",
    "paged_attention",
    "paged_attention_update",
]
