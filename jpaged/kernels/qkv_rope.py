"""QKV splitting and RoPE on TPUs, in Pallas Mosaic: reads a projection once, and writes the attention kernels' layout.

    projection    [T, K * (G + 2) * D]  a token's queries, keys and values, concatenated by the matmul
    queries       [T, K * G * D]       a token's heads, concatenated and rotated
    keys, values  [T, K, 2, D]         as the pool stores them, keys rotated: two 16-bit numbers per word

XLA moves sublanes one by one for each of the three (a fifth of a step of 64 tokens, and a third of one of 2048, by
libtpu's own estimate). This kernel moves queries by whole tiles, and packs a key and its value into words, which it
stores with a stride.

Callers see the results as [T, H, D] and twice [T, K, D]; packing them in this memory order costs nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float

_LANES = 128
_TILES = (128, 64, 32, 16, 8)
_VMEM_BYTES = 16 * 2**20
Angles = tuple[jax.Array, jax.Array]
"""Cosines and sines of each token [T, D], the sines of the first half of the dimensions negative."""
Norms = tuple[jax.Array, jax.Array, jax.Array | float]
"""Scales [D] of the norms of each query and of each key, and their epsilon, which shard_map traces."""


def unsupported_reason(head_dim: int, dtype: jnp.dtype, kv_dtype: jnp.dtype, num_rows: int) -> str | None:
    """Return why heads of this size and type are not supported, or None.

    Args:
        num_rows: heads in a projection, K (G + 2).
    """
    if head_dim % _LANES:
        return f"head_dim {head_dim} is not a multiple of {_LANES}"
    if dtype != jnp.bfloat16 or kv_dtype != jnp.bfloat16:
        return f"heads and keys must both be bfloat16; they are {dtype} and {kv_dtype}"
    if _bytes_of_tile(_TILES[-1], num_rows, head_dim) > _VMEM_BYTES:
        return f"{num_rows} heads of {head_dim} do not fit in vector memory"
    return None


def angles(cos_td: Float[Array, "T D/2"], sin_td: Float[Array, "T D/2"]) -> Angles:
    """Return angles in the form that `turn` takes, once for all layers."""
    return jnp.concatenate([cos_td, cos_td], axis=1), jnp.concatenate([-sin_td, sin_td], axis=1)


def turn(
    qkv_tkrd: Float[Array, "T K G+2 D"], angles: Angles, norms: Norms | None
) -> tuple[Float[Array, "T H D"], Float[Array, "T K D"], Float[Array, "T K D"]]:
    """Rotate queries and keys by their angles, in float32; return them and the values.

    Args:
        qkv_tkrd: for each key/value head its queries, their key and their value.
        angles: from `angles`.
        norms: scales [D] of the norm of each query and of each key, and their epsilon; None for no norms.
    """
    num_tokens, num_kv_heads, num_rows, head_dim = qkv_tkrd.shape
    sizes = _Sizes(num_kv_heads, num_rows - 2, head_dim)
    q_tl, new_tk2d = _call(qkv_tkrd.reshape(num_tokens, -1), sizes, angles, norms)
    q_thd = q_tl.reshape(num_tokens, num_kv_heads * sizes.group, head_dim)
    return q_thd, new_tk2d[:, :, 0], new_tk2d[:, :, 1]


@dataclass(frozen=True, slots=True)
class _Sizes:
    num_kv_heads: int
    group: int
    head_dim: int


def _bytes_of_tile(tile: int, num_rows: int, head_dim: int) -> int:
    """Return the memory of a tile of tokens: double-buffered inputs and outputs of all heads, and angles."""
    return 2 * tile * head_dim * (2 * 2 * num_rows + 2 * 4)


def _call(qkv_tl: jax.Array, sizes: _Sizes, angles: Angles, norms: Norms | None) -> tuple[jax.Array, jax.Array]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    num_tokens, num_lanes = qkv_tl.shape
    num_kv_heads, head_dim = sizes.num_kv_heads, sizes.head_dim
    num_heads = num_lanes // head_dim
    tile = next(
        (t for t in _TILES if num_tokens % t == 0 and _bytes_of_tile(t, num_heads, head_dim) <= _VMEM_BYTES), num_tokens
    )
    scales = () if norms is None else norms[:2]
    epsilons = () if norms is None else norms[2:]
    width = num_kv_heads * sizes.group * head_dim
    new_shape = (num_kv_heads, 2, head_dim)
    of_angles = pl.BlockSpec((tile, head_dim), lambda i: (i, 0))
    q_tl, new = pl.pallas_call(
        functools.partial(_kernel, sizes=sizes),
        grid=(num_tokens // tile,),
        in_specs=[
            pl.BlockSpec((tile, num_lanes), lambda i: (i, 0)),
            of_angles,
            of_angles,
            *(pl.BlockSpec((1, head_dim), lambda i: (0, 0)) for _ in scales),
            *(pl.BlockSpec(memory_space=pltpu.SMEM) for _ in epsilons),
        ],
        out_specs=[
            pl.BlockSpec((tile, width), lambda i: (i, 0)),
            pl.BlockSpec((tile, *new_shape), lambda i: (i, 0, 0, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((num_tokens, width), qkv_tl.dtype),
            jax.ShapeDtypeStruct((num_tokens, *new_shape), qkv_tl.dtype),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=2 * _VMEM_BYTES),
        cost_estimate=pl.CostEstimate(
            flops=3 * qkv_tl.size, transcendentals=0, bytes_accessed=2 * qkv_tl.nbytes + 2 * angles[0].nbytes
        ),
        name="turn_heads",
    )(
        qkv_tl,
        *angles,
        *(jnp.asarray(scale, jnp.float32).reshape(1, -1) for scale in scales),
        *(jnp.asarray(eps, jnp.float32).reshape(1) for eps in epsilons),
    )
    return q_tl, new


def _kernel(qkv_ref: Any, cos_ref: Any, sin_ref: Any, *refs: Any, sizes: _Sizes) -> None:
    """Process one tile of tokens, head by head."""
    *norm_refs, q_ref, new_ref = refs
    cos_td, sin_td, head_dim = cos_ref[...], sin_ref[...], sizes.head_dim
    q_scale_1d, k_scale_1d = (ref[...] for ref in norm_refs[:2]) if norm_refs else (None, None)
    eps = norm_refs[2][0] if norm_refs else 0.0

    def turned(x_td: Any, scale_1d: Any) -> Any:
        x_td = x_td.astype(jnp.float32)
        if scale_1d is not None:
            mean_t1 = jnp.mean(jnp.square(x_td), axis=1, keepdims=True)
            normal_td = x_td * jax.lax.rsqrt(mean_t1 + eps) * scale_1d
            x_td = normal_td.astype(qkv_ref.dtype).astype(jnp.float32)
        return (x_td * cos_td + _halves_swapped(x_td) * sin_td).astype(qkv_ref.dtype)

    def lanes_of(head: int) -> slice:
        return slice(head * head_dim, (head + 1) * head_dim)

    for k in range(sizes.num_kv_heads):
        first = k * (sizes.group + 2)
        for g in range(sizes.group):
            q_ref[:, lanes_of(k * sizes.group + g)] = turned(qkv_ref[:, lanes_of(first + g)], q_scale_1d)
        key, value = lanes_of(first + sizes.group), lanes_of(first + sizes.group + 1)
        key_td, value_td = turned(qkv_ref[:, key], k_scale_1d), qkv_ref[:, value]
        for lane in range(0, head_dim, _LANES):
            lanes = slice(lane, lane + _LANES)
            store(new_ref, k, lane // _LANES, _words(key_td[:, lanes], value_td[:, lanes]))


def _halves_swapped(x_td: Any) -> Any:
    from jax.experimental.pallas import tpu as pltpu

    half = x_td.shape[1] // 2
    if half % _LANES == 0:
        return jnp.concatenate([x_td[:, half:], x_td[:, :half]], axis=1)
    return pltpu.roll(x_td, half, 1)


def _words(key_tl: Any, value_tl: Any) -> Any:
    """Return words with a key's number in the lower half and the value's in the upper half."""
    from jax.experimental.pallas import tpu as pltpu

    key_bits, value_bits = (pltpu.bitcast(x.astype(jnp.float32), jnp.int32) for x in (key_tl, value_tl))
    return jax.lax.shift_right_logical(key_bits, jnp.int32(16)) | (value_bits & jnp.int32(-(1 << 16)))


def store(new_ref: Any, head: int, part: int, words_tl: Any) -> None:
    """Store words [t, 128] in a head's part of the lanes of [t, K, 2, D], viewed as rows of words.

    Pallas' interpreter does not support bitcasts of references: tests replace this function.
    """
    from jax.experimental import pallas as pl

    num_tokens, num_heads, _, head_dim = new_ref.shape
    parts = head_dim // _LANES
    rows_ref = new_ref.bitcast(jnp.int32).reshape(num_tokens * num_heads * parts, _LANES)
    rows_ref[pl.ds(head * parts + part, num_tokens, stride=num_heads * parts), :] = words_tl
