"""Attention over keys and values in blocks; `paged_attention` is the operation.

api.py        the entry points; the backends, where each runs, and its limitations
spec.py       the arguments of a call; attention sinks: scores of heads without a value; the merge of parts
reference.py  the operation in plain XLA: its specification
cascade.py    attention over parts of contexts, merged: shared prefixes; first tokens and a window
measure.py    benchmark of attention on this device; head shapes of real models
cpu/          the kernel for CPUs
gpu/          the kernel for Hopper GPUs
tpu/          the kernel for TPUs
triton/       the kernels for other GPUs
cuda/         the same in CUDA C++, for a jax without Pallas Triton
"""

from jpaged.kernels.paged_attention.api import (
    Choice,
    choose,
    paged_attention,
    paged_attention_update,
    prepare_rows,
    rotate_heads,
)
from jpaged.kernels.paged_attention.spec import AttentionSpec, Queries, RaggedRows, add_sinks

__all__ = [
    "AttentionSpec",
    "Choice",
    "Queries",
    "RaggedRows",
    "add_sinks",
    "choose",
    "paged_attention",
    "paged_attention_update",
    "prepare_rows",
    "rotate_heads",
]
