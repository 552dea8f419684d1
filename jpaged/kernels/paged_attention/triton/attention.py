"""Paged attention on GPUs since Ampere: prefill chunks and decodes of ragged rows in one launch of a Triton kernel.

    rows -> tiles -> items -> kernel -> outputs of tokens
                                └ parts of a split context -> a second kernel merges them

The traced program builds the list of items from arrays: its length is fixed, and unused items do nothing. The kernels
are in `kernel.py`, which is imported when a call is traced.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jpaged.kernels.cuda_library import has_triton, unsupported_gpu_reason
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.spec import Attended, AttentionCall, ContextPart, Queries
from jpaged.kernels.paged_attention.triton.work import Cut, choose_cut, get_group, latent_bytes, plan

_QUERY_DTYPES = ("float32", "bfloat16", "float16")
_MAX_HEAD_DIM = 256
_MAX_LATENT_DIM = 640
_MAX_GROUP = 128
_SHARED_BYTES = 101_376
"""The smallest shared memory of a thread block: on GPUs of compute capability 8.6, 8.9 and 12."""


def unsupported_reason(layout: KVLayout, queries: Queries) -> str | None:
    """Return why a call cannot run here, or None."""
    group, dtype = get_group(layout, queries.num_heads), queries.dtype.name
    if dtype not in _QUERY_DTYPES:
        return f"queries are {dtype}; they must be {', '.join(_QUERY_DTYPES)}"
    if layout.value_dim is not None:
        return _latents_reason(layout, layout.value_dim, queries)
    if layout.head_dim % 16 or layout.head_dim > _MAX_HEAD_DIM:
        return f"head_dim {layout.head_dim} is not a multiple of 16 up to {_MAX_HEAD_DIM}"
    if group > _MAX_GROUP:
        return f"{group} query heads share a key/value head; the limit is {_MAX_GROUP}"
    if layout.is_scaled and layout.head_dim % 32 and 1 << 31 < layout.num_bytes <= 1 << 32:
        return (
            f"the pool has {layout.num_bytes} bytes in heads of {layout.head_dim} 8-bit numbers; from {1 << 31} to "
            f"{1 << 32} bytes, heads must be a multiple of 32"
        )
    return None


def _latents_reason(layout: KVLayout, value_dim: int, queries: Queries) -> str | None:
    if layout.head_dim % 32 or value_dim % 32 or layout.head_dim > _MAX_LATENT_DIM:
        return f"latents of {layout.head_dim} and {value_dim} numbers are not multiples of 32 up to {_MAX_LATENT_DIM}"
    if (need := latent_bytes(layout, queries.dtype)) > _SHARED_BYTES:
        return (
            f"latents of {layout.head_dim} numbers require {need} bytes of shared memory; the limit is {_SHARED_BYTES}"
        )
    return None


def unsupported_device_reason(device: jax.Device) -> str | None:
    """Return why it does not run on this device, or with this jax, or None."""
    if (reason := unsupported_gpu_reason(device)) is not None:
        return reason
    return None if has_triton() else f"requires Pallas Triton, which jax {jax.__version__} does not have"


def attend(call: AttentionCall, cut: Cut | None = None, *, is_interpreted: bool = False) -> Attended:
    """See `jpaged.kernels.paged_attention.paged_attention`.

    Args:
        call: the call.
        cut: overrides the default cut.
        is_interpreted: run the kernels on a CPU, in Pallas' interpreter.
    """
    return attend_parts(call, [ContextPart(call.rows, call.spec)], cut, is_interpreted=is_interpreted)


def attend_parts(
    call: AttentionCall, parts: Sequence[ContextPart], cut: Cut | None = None, *, is_interpreted: bool = False
) -> Attended:
    """Run `attend` over parts of the contexts of the call's rows, all of them in one launch and merged in another."""
    from jpaged.kernels.paged_attention.triton import kernel

    q_thd, rows, spec = call.q_thd, call.rows, call.spec
    num_tokens, num_heads, _ = q_thd.shape
    num_rows, table_width = rows.block_tables_sm.shape
    sizes = num_tokens, num_rows, table_width
    cut = cut or choose_cut(spec, q_thd.dtype, num_heads, sizes, [part.table_rows_s is not None for part in parts])
    return kernel.attend_items(
        q_thd,
        kernel.pack_words(call.pool, spec.layout),
        rows.block_tables_sm.astype(jnp.int32),
        plan(parts, cut, num_tokens),
        jnp.asarray(call.layer, jnp.int32).reshape(1),
        jnp.zeros((1, 1, 1), jnp.float32) if call.scales_lk2 is None else call.scales_lk2.astype(jnp.float32),
        kernel.TritonKernelParams(tuple(part.spec for part in parts), cut, is_interpreted),
    )
