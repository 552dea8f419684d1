"""The XLA backend of paged attention, and what its cost depends on."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import Backend
from jpaged.errors import InternalError, InvalidArgument, Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVForm, KVLayout
from jpaged.kernels.paged_attention import AttentionSpec, RaggedRows, paged_attention, reference
from jpaged.kernels.paged_attention.measure import SHAPES
from jpaged.kernels.paged_attention.spec import AttentionCall
from tests.kernels.attention_conformance import RAGGED, PagedAttentionConformance, real_shape


@pytest.mark.thinned(3)
class TestXla(PagedAttentionConformance):
    backend = "xla"

    @pytest.mark.long
    @pytest.mark.parametrize("name", SHAPES)
    def test_real_head_shapes(self, name: str) -> None:
        self.check(RAGGED["mixed"], real_shape(name))


@pytest.mark.long
@pytest.mark.thinned(3)
class TestXlaInGroups(PagedAttentionConformance):
    """As accelerators run it, in groups so small that the cases need several, the last of them not full."""

    backend = "xla"
    form = "gpu"

    @pytest.fixture(autouse=True)
    def _small_groups(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reference, "GROUP_ROWS", 3)
        monkeypatch.setattr(reference, "GROUP_TILES", 2)


@pytest.mark.parametrize(("form", "turns"), [("cpu", 3 + 2 + 1 + 3), ("gpu", 3 + 3)])
@pytest.mark.long
def test_rows_take_the_chunks_of_their_contexts_in_turns(
    form: KVForm, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows that decode and a prompt of three chunks: one by one on CPUs, else as many turns as the longest."""
    seen: list[int] = []
    read = reference._read_chunks

    def counted(call: AttentionCall, chunks_n: jax.Array, segments: Any) -> Any:
        jax.debug.callback(seen.append, chunks_n.shape[0])
        return read(call, chunks_n, segments)

    monkeypatch.setattr(reference, "_read_chunks", counted)
    spec = AttentionSpec(KVLayout(1, 40, 16, 2, 16, jnp.dtype("float32"), form), AttentionKind(1.0))
    nums, lens = np.array([1, 1, 1, 5]), np.array([300, 200, 100, 384])
    rows = RaggedRows(
        jnp.asarray(np.cumsum([0, *nums]), jnp.int32),
        jnp.asarray(lens, jnp.int32),
        jnp.zeros((4, 24), jnp.int32),
        jnp.int32(4),
    )
    pool, q_thd = jnp.zeros(spec.layout.shape), jnp.zeros((8, 2, 16))
    jax.block_until_ready(paged_attention(q_thd, pool, 0, rows, spec, backend="xla"))
    jax.effects_barrier()
    assert len(seen) == turns


def _call(
    backend: str = "xla",
    *,
    kv_dtype: str = "float32",
    pool_dtype: str | None = None,
    num_heads: int = 4,
    scales_lk2: jax.Array | None = None,
) -> None:
    spec = AttentionSpec(KVLayout(1, 4, 8, 2, 16, jnp.dtype(kv_dtype)), AttentionKind(1.0))
    pool = jnp.zeros(spec.layout.shape, pool_dtype or spec.layout.storage_dtype)
    rows = RaggedRows(*(jnp.zeros(shape, jnp.int32) for shape in ((3,), (2,), (2, 4), ())))
    paged_attention(jnp.zeros((8, num_heads, 16)), pool, 0, rows, spec, scales_lk2, backend=cast(Backend, backend))


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match=r"attention backend 'magic' does not exist; available: xla"):
        _call("magic")


def test_a_pool_of_another_type_is_refused() -> None:
    with pytest.raises(InternalError, match="the pool is bfloat16"):
        _call(pool_dtype="bfloat16")


def test_query_heads_must_be_a_multiple_of_key_heads() -> None:
    with pytest.raises(InternalError, match="do not fit 2 key/value heads"):
        _call(num_heads=5)


def test_a_pool_has_scales_where_it_keeps_8_bits_and_nowhere_else() -> None:
    with pytest.raises(InternalError, match="a pool of int8 requires scales"):
        _call(kv_dtype="int8")
    with pytest.raises(InternalError, match="a pool of float32 has no scales"):
        _call(scales_lk2=jnp.ones((1, 2, 2)))


@pytest.mark.parametrize(("window", "cap", "field"), [(0, None, "sliding_window"), (None, 0.0, "soft_cap")])
def test_limits_of_the_spec(window: int | None, cap: float | None, field: str) -> None:
    layout = KVLayout(1, 4, 8, 2, 16, jnp.dtype("float32"))
    with pytest.raises(InvalidArgument, match=field):
        AttentionSpec(layout, AttentionKind(1.0, window, cap))
