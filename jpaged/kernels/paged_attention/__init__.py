"""Attention over keys and values in blocks; `paged_attention` is the operation.

api.py         the entry points
spec.py        the arguments of a call
backends.py    the backends, where each runs, and its limitations
reference.py   the operation in plain XLA: its specification
cascade.py     rows that share a prefix; attention over parts of contexts, merged
streaming.py   rows that see the first tokens and a window
sinks.py       attention sinks: scores of heads without a value
shapes.py      head shapes of real models
measure.py     benchmark of attention on this device
cpu/           the kernel for CPUs
gpu/           the kernel for Hopper GPUs
tpu/           the kernel for TPUs
triton/        the kernels for other GPUs
"""

from jpaged.kernels.paged_attention.api import paged_attention, paged_attention_update, prepare_rows
from jpaged.kernels.paged_attention.backends import Choice, choose
from jpaged.kernels.paged_attention.sinks import add_sinks
from jpaged.kernels.paged_attention.spec import AttentionSpec, Queries, RaggedRows

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
]
