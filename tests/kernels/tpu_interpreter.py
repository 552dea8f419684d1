"""Runs the TPU kernel on this machine, in the two ways that show different mistakes.

LATE    a DMA happens when somebody waits for it: what nobody waits for never happens
EARLY   a DMA happens at once, and each access is checked against all that it is not ordered with

It is taught references that are seen as another type or shape, which Mosaic knows and the interpreter does not:

    ref.at[i].bitcast(int32).reshape(n, 128)[pl.ds(first, size, stride), :]
        └─ read whole, and looked at for races ─┘ └─ what is taken of it ─┘

Only reads are taught. A view counts as a read of all that it shows: that finds no fewer races.

And `pltpu.pack_elementwise`, which jax lowers for TPUs alone:

    | .. a |, | .. b |  ->  | b a |        the lowest bits of each
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic import primitives
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic.interpret import utils
from jax._src.state import types
from jax.experimental.pallas import tpu as pltpu
from jax.interpreters import mlir

from jpaged.kernels.paged_attention import paged_attention, paged_attention_update
from jpaged.kernels.paged_attention.tpu import sizes as sizing
from jpaged.kernels.paged_attention.tpu import words
from jpaged.kernels.paged_attention.tpu.chunks import sizes as chunk_sizes
from jpaged.kernels.paged_attention.tpu.decode import sizes as decode_sizes
from tests.conftest import QUICK_XLA_OPTIONS
from tests.kernels.attention_conformance import BackendUnderTest, PagedAttentionConformance, Support

LATE = pltpu.InterpretParams(dma_execution_mode="on_wait")
# Each DMA draws an entry of the clocks. By default there is one for all of them, and no two DMAs ever race.
EARLY = pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True, vector_clock_size=256)

# What XLA compiles is the interpreter, whose copies and clocks are the test: it is not what a server runs.
COMPILER_OPTIONS = QUICK_XLA_OPTIONS

_STATIC = ("spec", "backend")
_attention = jax.jit(paged_attention, static_argnames=_STATIC, compiler_options=COMPILER_OPTIONS)
_update = jax.jit(
    paged_attention_update, static_argnames=_STATIC, donate_argnames="pool", compiler_options=COMPILER_OPTIONS
)


_VIEWS = (types.BitcastTransform, types.ReshapeTransform)


def seen_as(array: np.ndarray, view: Any) -> np.ndarray:
    """The array as a TPU sees it: a word of 32 bits is one lane of rows that follow each other, the first lowest."""
    if isinstance(view, types.ReshapeTransform):
        return array.reshape(view.shape)
    ratio = np.dtype(view.dtype).itemsize // array.dtype.itemsize
    *outer, rows, lanes = array.shape
    assert ratio and rows % ratio == 0
    words = np.moveaxis(array.reshape(*outer, rows // ratio, ratio, lanes), -2, -1)
    return np.ascontiguousarray(words).view(view.dtype).reshape(*outer, rows // ratio, lanes)


@contextlib.contextmanager
def views() -> Iterator[None]:
    """Reads through views work inside."""
    get = interpreter.get

    @functools.wraps(get)
    def get_through_views(*args: Any, **options: Any) -> Any:
        *before, transforms = args[:6]
        first = next((i for i, transform in enumerate(transforms) if isinstance(transform, _VIEWS)), len(transforms))
        token, array = get(*before, transforms[:first], *args[6:], **options)
        for transform in transforms[first:]:
            if isinstance(transform, _VIEWS):
                array = seen_as(np.asarray(array), transform)
            else:
                array = array[utils.to_range((jax.tree.map(int, transform),))]
        return token, array

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "get", get_through_views)
        yield


@contextlib.contextmanager
def interpreted(params: pltpu.InterpretParams) -> Iterator[None]:
    """What is called inside runs in the interpreter; a race is an error."""
    # The interpreter's own record is renewed by every call of a kernel, and an update makes two; what it prints stays.
    printed = io.StringIO()
    try:
        with pltpu.force_tpu_interpret_mode(params), views(), contextlib.redirect_stdout(printed):
            yield
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert "RACE DETECTED" not in printed.getvalue(), printed.getvalue()


def packed(*parts: jax.Array, packed_dtype: Any) -> jax.Array:
    """What `pltpu.pack_elementwise` does with integers."""
    bits = jnp.iinfo(packed_dtype).bits
    whole = jnp.dtype(f"uint{bits * len(parts)}")
    mask = jnp.asarray(2**bits - 1, whole)
    return functools.reduce(jnp.bitwise_or, [(x.astype(whole) & mask) << (i * bits) for i, x in enumerate(parts)])


mlir.register_lowering(primitives.pack_elementwise_p, mlir.lower_fun(packed, multiple_results=False), platform="cpu")


def read_words(buffer_ref: Any, start: Any, num: int, stride: int) -> jax.Array:
    """What `words.read` does, of the buffer as it is: the interpreter knows no other view of it."""
    return lax.dynamic_slice_in_dim(_words(buffer_ref[...]), start, (num - 1) * stride + 1)[::stride]


def write_words(buffer_ref: Any, start: Any, rows: jax.Array) -> None:
    """What `words.write` does."""
    whole = buffer_ref[...]
    changed = lax.dynamic_update_slice_in_dim(_words(whole), rows, start, axis=0)
    *blocks, pack, lanes = whole.shape
    parts = lax.bitcast_convert_type(changed, whole.dtype)
    buffer_ref[...] = jnp.swapaxes(parts.reshape(*blocks, lanes, pack), -1, -2)


def spread(ref: Any, row: int, numbers: jax.Array) -> None:
    """What `words.spread` does."""
    whole = ref[...]
    rows = whole.reshape(len(whole), -1, whole.shape[-1])
    ref[...] = lax.dynamic_update_slice_in_dim(rows, numbers[:, None], row, axis=1).reshape(whole.shape)


def _words(whole: jax.Array) -> jax.Array:
    parts = jnp.swapaxes(whole, -1, -2)
    found = lax.bitcast_convert_type(parts if parts.shape[-1] > 1 else parts[..., 0], jnp.int32)
    return found.reshape(-1, words.LANES)


@contextlib.contextmanager
def small_sizes() -> Iterator[None]:
    """Chunks, tiles and pages that the tests' short contexts have several of, and loads that the interpreter knows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_sizes, "_MAX_CHUNK_TOKENS", 128)
        patch.setattr(sizing, "PAGE_ALIGNMENT", 8)
        patch.setattr(sizing, "PAGES_AHEAD", 2)
        patch.setattr(decode_sizes, "_PLACES_BYTES", 0)
        patch.setattr(words, "read", read_words)
        patch.setattr(words, "write", write_words)
        patch.setattr(words, "spread", spread)
        patch.setattr(chunk_sizes, "_CHUNK_TOKENS", (128, 256))
        patch.setattr(chunk_sizes, "_TILES", (32, 16))
        patch.setattr(chunk_sizes, "_PART_ROWS", 32)
        yield


class Device(BackendUnderTest):
    """An interpreter as the device."""

    backend = "pallas-tpu"
    form = "tpu"
    supports = Support(block_sizes=frozenset({8, 16, 32, 64, 128, 256}))
    params = LATE

    def attend(self, q, pool, layer, rows, spec, scales):
        with interpreted(self.params), small_sizes():
            return jax.block_until_ready(_attention(q, pool, layer, rows, spec, scales, backend=self.backend))

    def update(self, q, new_kv, pool, layer, rows, spec, scales):
        with interpreted(self.params), small_sizes():
            return jax.block_until_ready(_update(q, new_kv, pool, layer, rows, spec, scales, backend=self.backend))


class Interpreted(Device, PagedAttentionConformance):
    """The whole suite on it."""


class Late(Interpreted):
    params = LATE


class Early(Interpreted):
    params = EARLY
