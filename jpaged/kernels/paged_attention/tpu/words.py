"""A buffer of blocks as rows of 128 32-bit words, and the numbers in its words.

A token's row of tiles in the pool is `pack` rows of numbers in one row of words. Reading one row of words of every
token is a strided load; sliced from the five axes of a buffer it would be shuffled together from single sublanes
(counted for v6e: 1350 cycles of arithmetic per MiB of keys and values, 400 with strides).

    words     t0: k v   t1: k v  ...   tw: k v  ...          (bfloat16: a key and its value share a word)
    numbers   k: t0 tw t1 tw+1 ...                           two tokens per word: of the first half, of the second

The interpreter supports neither reshapes nor bitcasts of references: tests replace `read`, `write` and `spread`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
FP8_SHIFT = 120
"""8-bit floats are 2^120 times too small after their bits are moved into a bfloat16."""


def read(buffer_ref: Any, start: Any, num: int, stride: int) -> Any:
    """Return words [num, 128] of every stride-th row of a buffer [..., pack, lanes], from `start` on."""
    return _rows(buffer_ref)[pl.ds(start, num, stride=stride), :]


def write(buffer_ref: Any, start: Any, words: Any) -> None:
    """Write words [n, 128] into consecutive rows."""
    _rows(buffer_ref)[pl.ds(start, words.shape[0]), :] = words


def spread(ref: Any, row: int, numbers: Any) -> None:
    """Write [n, lanes] of 32 bits into a row of each of n places of a reference [n, bundles, rows, lanes]."""
    num, bundles, rows, lanes = ref.shape
    if lanes == LANES:
        ref.reshape(-1, lanes)[pl.ds(row, num, stride=bundles * rows), :] = numbers
    else:  # Mosaic supports strides only for rows of one register
        ref[:, row // rows, row % rows, :] = numbers


def gather(ref: Any, row: int) -> Any:
    """Return a row [n, lanes] of each of n places of a reference [n, bundles, rows, lanes]."""
    num, bundles, rows, lanes = ref.shape
    if lanes == LANES:
        return ref.reshape(-1, lanes)[pl.ds(row, num, stride=bundles * rows), :]
    return ref[:, row // rows, row % rows, :]


def _rows(buffer_ref: Any) -> Any:
    words_ref = buffer_ref if buffer_ref.dtype == jnp.int32 else buffer_ref.bitcast(jnp.int32)
    return words_ref.reshape(-1, LANES)


def tokens_a_word(dtype: jnp.dtype, *, takes_fp8: bool) -> int:
    """Return the number of tokens that share a word of the result of `numbers`."""
    if dtype == jnp.int8 or (dtype == jnp.float8_e4m3fn and takes_fp8):
        return 4
    return 1 if dtype == jnp.float32 else 2


def numbers_dtype(dtype: jnp.dtype, *, takes_fp8: bool) -> jnp.dtype:
    """Return the type of the result of `numbers`."""
    return dtype if tokens_a_word(dtype, takes_fp8=takes_fp8) != 2 else jnp.dtype(jnp.bfloat16)


def numbers(parts: list[Any], j: int, dtype: jnp.dtype, *, takes_fp8: bool, apart: int = 0) -> Any:
    """Return part j of each word, the lowest first, as numbers [W, 128].

    Args:
        parts: words [W / n, 128] of the chunk's first tokens, of the next, ..., with n from `tokens_a_word`.
        j: index among the `pack` numbers of each word.
        dtype: of the numbers in the words.
        takes_fp8: return 8-bit floats as they are.
        apart: distance to another part of the same words that is also read, and shares operations; 0 for none.

    Returns:
        Numbers of token i of part 0, of part 1, ..., then of token i + 1. Those of float8 are 2^FP8_SHIFT times too
        small unless returned as they are, and those below 2^-6, its subnormals, may be zero: min(n, 2 n - 2^-14), for n
        with another exponent, would preserve them all, but then a MiB of keys and values takes a v6e 1652 cycles
        instead of 1153.
    """
    if dtype == jnp.float32:
        return pltpu.bitcast(parts[0], jnp.float32)
    if len(parts) == 4:
        return _bytes(parts, j, dtype, apart=apart)
    a, b = parts
    if dtype == jnp.bfloat16:
        return pltpu.bitcast(_halves(a, b, j), jnp.bfloat16)
    # Moves sign, four bits of exponent and three of mantissa to their places in each half of a word.
    halves = _halves(a, b, j // 2)
    if j % 2:
        magnitude, sign = (halves >> 4) & jnp.int32(0x07F007F0), halves & _signed(0x80008000)
    else:
        magnitude, sign = (halves & jnp.int32(0x007F007F)) << 4, (halves & jnp.int32(0x00800080)) << 8
    return pltpu.bitcast(magnitude | sign, jnp.bfloat16)


def parted(even: Any, odd: Any) -> tuple[Any, Any]:
    """Separate the keys of two heads from their values, given words whose lanes are key | value of one head each.

    | k0 v0 |, | k1 v1 |  ->  | k1 v0 |  ->  | v0 k1 |, rotated  ->  | k0 k1 |, | v0 v1 |
    """
    even, odd, dtype = pltpu.bitcast(even, jnp.int32), pltpu.bitcast(odd, jnp.int32), even.dtype
    is_first = lax.broadcasted_iota(jnp.int32, even.shape, 1) < LANES // 2
    turned = pltpu.roll(jnp.where(is_first, odd, even), LANES // 2, 1)
    k, v = jnp.where(is_first, even, turned), jnp.where(is_first, turned, odd)
    return pltpu.bitcast(k, dtype), pltpu.bitcast(v, dtype)


def _halves(a: Any, b: Any, j: int) -> Any:
    """Return the lower (0) or upper half of a's words below that of b's."""
    if j == 0:
        return _pack(a, b, jnp.int16)
    return lax.shift_right_logical(a, jnp.int32(16)) | (b & _signed(0xFFFF0000))


def _bytes(parts: list[Any], j: int, dtype: jnp.dtype, *, apart: int) -> Any:
    """Return byte j of four words as one word."""
    a, b, c, d = parts
    if apart == 1 or (apart == 0 and j == 0):
        halves = [_halves(*pair, j // 2) for pair in ((a, c), (b, d))]
        if j % 2:
            halves = [lax.shift_right_logical(half, jnp.int32(8)) for half in halves]
        lower, upper = (pltpu.bitcast(half, jnp.int16) for half in halves)
        return pltpu.bitcast(_pack(lower, upper, jnp.int8), dtype)
    low, high = (_every_other_byte(*pair, j % 2) for pair in ((a, b), (c, d)))
    if j < 2:
        return pltpu.bitcast(_pack(low, high, jnp.int16), dtype)
    return pltpu.bitcast(_chosen(high, lax.shift_right_logical(low, jnp.int32(16)), 0xFFFF0000), dtype)


def _every_other_byte(a: Any, b: Any, j: int) -> Any:
    """Return bytes j and j + 2 of a's words, each below that of b's."""
    if j == 0:
        return _chosen(b << 8, a, 0xFF00FF00)
    return _chosen(b, lax.shift_right_logical(a, jnp.int32(8)), 0xFF00FF00)


def _chosen(a: Any, b: Any, mask: int) -> Any:
    """Select the bytes of a's words in the mask, and the others of b's, in one operation."""
    is_a = pltpu.bitcast(jnp.full(a.shape, _signed(mask)), jnp.int8) != 0
    return pltpu.bitcast(jnp.where(is_a, pltpu.bitcast(a, jnp.int8), pltpu.bitcast(b, jnp.int8)), jnp.int32)


def _pack(a: Any, b: Any, half: Any) -> Any:
    """Return the lower halves of a's integers below those of b's, in one operation."""
    return pltpu.bitcast(pltpu.pack_elementwise([a, b], packed_dtype=half), a.dtype)


def _signed(word: int) -> Any:
    return jnp.int32(word - 2**32)
