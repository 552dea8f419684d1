"""An attention call with random numbers, and its expected results from NumPy.

The oracle computes a row at a time in float64, from keys and values as the pool stores them. Slots that no row owns,
queries of padding tokens and the memory of the results hold NaN before a kernel runs.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (names of types for NumPy)
import numpy as np

from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import MAX_NUMBER, KVForm, KVLayout
from jpaged.kernels.paged_attention.cascade import CascadeRows
from jpaged.kernels.paged_attention.spec import AttentionSpec, ContextPart, RaggedRows

TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3}
"""Largest difference of outputs, absolute and relative, by the type of the queries."""
LSE_TOLERANCE = 1e-4
NUM_LAYERS, LAYER = 2, 1

Row = tuple[int, int]
"""Queries, and tokens of the context."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads and types of a call.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: numbers of a head.
        dtype: of the queries.
        kv_dtype: of the pool.
        block_size: tokens of a block.
        window: tokens that a query sees; None is all.
        soft_cap: of the scores; None is none.
        value_dim: keys are latents with values of this size; None stores values.
    """

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    value_dim: int | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """A call: heads, rows, and the tokens that rows share.

    Attributes:
        shared: tokens that all rows have in common, whole blocks; 0 is no cascade.
    """

    heads: Heads
    rows: tuple[Row, ...]
    shared: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the call; some of them are padding."""
        return -(-(sum(queries for queries, _ in self.rows) + 1) // 8) * 8


@dataclass(frozen=True, slots=True)
class Numbers:
    """The arrays of a problem on the host.

    Attributes:
        q_thd: queries, float32 after rounding to their type; NaN for padding.
        contexts: keys and values [context, K, D] of each row as stored, float32.
        scales_lk2: of a pool of 8 bits, or None.
        k_nkd, v_nkd: keys and values to write into the layer, divided by their scales; v is None for latents.
        slots_n: the slot of each of them.
        tables_sm: block tables.
        layout: of the pool.
    """

    q_thd: np.ndarray
    contexts: tuple[tuple[np.ndarray, np.ndarray], ...]
    scales_lk2: np.ndarray | None
    k_nkd: np.ndarray
    v_nkd: np.ndarray | None
    slots_n: np.ndarray
    tables_sm: np.ndarray
    layout: KVLayout


def layout_of(problem: Problem, form: KVForm) -> KVLayout:
    """Return the layout of a pool that holds the rows and a few blocks more."""
    heads, num_shared = problem.heads, problem.shared // problem.heads.block_size
    num_blocks = sum(-(-context // heads.block_size) - num_shared for _, context in problem.rows) + num_shared + 4
    return KVLayout(
        *(NUM_LAYERS, num_blocks, heads.block_size, heads.num_kv_heads, heads.head_dim),
        *(jnp.dtype(heads.kv_dtype), form),
        value_dim=heads.value_dim,
    )


def table_shape(problem: Problem) -> tuple[int, int]:
    """Return rows and columns of the block tables."""
    return len(problem.rows), -(-max(context for _, context in problem.rows) // problem.heads.block_size)


def draw(problem: Problem, form: KVForm, seed: int = 0) -> Numbers:
    """Draw random queries, keys and values, and place the blocks of the rows at random."""
    heads, rng = problem.heads, np.random.default_rng(seed)
    size = heads.block_size
    num_shared = problem.shared // size
    needs = [-(-context // size) - num_shared for _, context in problem.rows]
    layout = layout_of(problem, form)
    ids = rng.permutation(layout.num_blocks).astype(np.int32) + 1
    common, ids = ids[:num_shared], ids[num_shared:]
    tables = np.zeros(table_shape(problem), np.int32)
    scales = _scales(heads, rng)
    of_layer = None if scales is None else scales[LAYER]
    prefix, contexts, written, slots = _stored(heads, problem.shared, of_layer, rng), [], [], []
    for i, (_, context) in enumerate(problem.rows):
        tables[i, : num_shared + needs[i]] = np.concatenate([common, ids[: needs[i]]])
        ids = ids[needs[i] :]
        own = _stored(heads, context - problem.shared, of_layer, rng)
        whole = tuple(np.concatenate(pair) for pair in zip(prefix, own, strict=True)) if problem.shared else own
        contexts.append((whole[0], whole[1]))
        first = problem.shared if i else 0
        places = np.arange(first, context)
        slots.append(tables[i, places // size] * size + places % size)
        written.append((whole[0][first:], whole[1][first:]))
    k_nkd, v_nkd = (np.concatenate(arrays) for arrays in zip(*written, strict=True))
    if of_layer is not None:
        k_nkd, v_nkd = k_nkd / of_layer[:, :1], v_nkd / of_layer[: v_nkd.shape[1], 1:]
    q = rng.standard_normal((problem.num_tokens, heads.num_heads, heads.head_dim), np.float32) * 2
    q = q.astype(heads.dtype).astype(np.float32)
    q[sum(queries for queries, _ in problem.rows) :] = np.nan
    stored_v = v_nkd if heads.value_dim is None else None
    return Numbers(q, tuple(contexts), scales, k_nkd, stored_v, np.concatenate(slots), tables, layout)


def _scales(heads: Heads, rng: np.random.Generator) -> np.ndarray | None:
    if jnp.dtype(heads.kv_dtype).itemsize > 1:
        return None
    spread = rng.uniform(0.5, 1.5, (NUM_LAYERS, heads.num_kv_heads, 2)).astype(np.float32)
    if heads.value_dim is not None:
        spread[..., 1] = spread[..., 0]
    return spread * np.float32(4.0 / 127 if heads.kv_dtype == "int8" else 0.01)


def _stored(
    heads: Heads, num_tokens: int, scales_k2: np.ndarray | None, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return random keys and values [n, K, D] after a round trip through the pool's type."""
    k, v = rng.standard_normal((2, num_tokens, heads.num_kv_heads, heads.head_dim), np.float32)
    k, v = (_rounded(x, heads, None if scales_k2 is None else scales_k2[:, i : i + 1]) for i, x in enumerate((k, v)))
    return k, v if heads.value_dim is None else k[..., : heads.value_dim]


def _rounded(x_nkd: np.ndarray, heads: Heads, scales_k1: np.ndarray | None) -> np.ndarray:
    if scales_k1 is None:
        return x_nkd.astype(jnp.dtype(heads.kv_dtype)).astype(np.float32)
    largest = MAX_NUMBER[heads.kv_dtype]
    x_nkd = np.clip(x_nkd / scales_k1, -largest, largest)
    x_nkd = np.round(x_nkd) if heads.kv_dtype == "int8" else x_nkd
    return x_nkd.astype(jnp.dtype(heads.kv_dtype)).astype(np.float32) * scales_k1


def spec_of(problem: Problem, layout: KVLayout) -> AttentionSpec:
    """Return the static part of the call."""
    heads = problem.heads
    return AttentionSpec(layout, AttentionKind(heads.head_dim**-0.5, heads.window, heads.soft_cap))


def parts_of(problem: Problem, tables_sm: jax.Array, spec: AttentionSpec) -> tuple[ContextPart, ...]:
    """Return the parts of the contexts that the kernel attends to: one, or those of a cascade."""
    num_rows = len(problem.rows)
    starts = np.cumsum([0, *(queries for queries, _ in problem.rows)]).astype(np.int32)
    lens = np.array([context for _, context in problem.rows], np.int32)
    rows = RaggedRows(jnp.asarray(starts), jnp.asarray(lens), tables_sm, jnp.int32(num_rows))
    if not problem.shared:
        return (ContextPart(rows, spec),)
    begins = jnp.full((num_rows,), problem.shared, jnp.int32)
    runs = jnp.asarray(np.array([0, *[num_rows] * num_rows], np.int32))
    return CascadeRows.of(dataclasses.replace(rows, kv_begins_s=begins), runs, jnp.int32(1), spec).parts(spec)


def fill(layout: KVLayout, k_nkd: jax.Array, v_nkd: jax.Array | None, slots_n: jax.Array) -> jax.Array:
    """Return a pool with these keys and values in the layer, and with all bits set elsewhere: NaN in a float type."""
    pool = jnp.full(layout.shape, -1, f"int{8 * layout.dtype.itemsize}")
    pool = jax.lax.bitcast_convert_type(pool, layout.storage_dtype)
    return layout.write(pool, LAYER, k_nkd, v_nkd, slots_n)


def expected(problem: Problem, numbers: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs [T, H, D] and log-sum-exp [T, H] in float64; 0 and minus infinity for padding."""
    heads = problem.heads
    num_tokens, num_heads, head_dim = numbers.q_thd.shape
    group = num_heads // heads.num_kv_heads
    o_thd = np.zeros((num_tokens, num_heads, heads.value_dim or head_dim))
    lse_th = np.full((num_tokens, num_heads), -np.inf)
    starts = itertools.accumulate([0, *(queries for queries, _ in problem.rows)])
    for (queries, context), start, (k, v) in zip(problem.rows, starts, numbers.contexts, strict=False):
        positions = np.arange(context - queries, context)
        first = 0 if heads.window is None else max(0, context - queries - heads.window + 1)
        keys = np.arange(first, context)
        is_seen = keys[None] <= positions[:, None]
        if heads.window is not None:
            is_seen &= keys[None] > positions[:, None] - heads.window
        for head in range(num_heads):
            q = numbers.q_thd[start : start + queries, head].astype(np.float64)
            s = q @ k[first:, head // group].T.astype(np.float64) * head_dim**-0.5
            if heads.soft_cap is not None:
                s = heads.soft_cap * np.tanh(s / heads.soft_cap)
            s = np.where(is_seen, s, -np.inf)
            top = s.max(axis=1, keepdims=True)
            p = np.exp(s - top)
            total = p.sum(axis=1, keepdims=True)
            o_thd[start : start + queries, head] = p @ v[first:, head // group].astype(np.float64) / total
            lse_th[start : start + queries, head] = (top + np.log(total))[:, 0]
    return o_thd, lse_th
