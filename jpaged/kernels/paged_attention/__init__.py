"""Attention over keys and values that lie in blocks; `paged_attention` is the operation.

api.py         the call, checked
spec.py        what a call is made of
backends.py    which kernels there are, where each runs, what it cannot do
reference.py   the operation in plain XLA: its specification
cascade.py     rows that begin with the same blocks; attention over parts of contexts, merged
streaming.py   rows that see the first tokens and a window
sinks.py       scores of heads that have no value
shapes.py      head shapes of real models
measure.py     how fast it is on this device
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
