"""Attention over keys and values that lie in blocks; `paged_attention` is the operation."""

from jpaged.kernels.paged_attention.api import Backend, paged_attention
from jpaged.kernels.paged_attention.spec import AttentionSpec, RaggedRows

__all__ = ["AttentionSpec", "Backend", "RaggedRows", "paged_attention"]
