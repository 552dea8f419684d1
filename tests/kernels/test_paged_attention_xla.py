"""The XLA backend of paged attention, and what its cost depends on."""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
import pytest

from jpaged.config import Backend
from jpaged.errors import InternalError, InvalidArgument, Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention import AttentionSpec, RaggedRows, paged_attention
from jpaged.kernels.paged_attention.shapes import SHAPES
from tests.kernels.attention_conformance import RAGGED, PagedAttentionConformance, real_shape


class TestXla(PagedAttentionConformance):
    backend = "xla"

    @pytest.mark.long
    @pytest.mark.parametrize("name", SHAPES)
    def test_real_head_shapes(self, name: str) -> None:
        self.check(RAGGED["mixed"], real_shape(name))


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
    with pytest.raises(Unsupported, match=r"no backend 'magic'; it has xla"):
        _call("magic")


def test_a_pool_of_another_type_is_refused() -> None:
    with pytest.raises(InternalError, match="the pool is bfloat16"):
        _call(pool_dtype="bfloat16")


def test_query_heads_must_be_a_multiple_of_key_heads() -> None:
    with pytest.raises(InternalError, match="do not fit 2 key/value heads"):
        _call(num_heads=5)


def test_a_pool_has_scales_where_it_keeps_8_bits_and_nowhere_else() -> None:
    with pytest.raises(InternalError, match="a pool of int8 needs its scales"):
        _call(kv_dtype="int8")
    with pytest.raises(InternalError, match="a pool of float32 takes no scales"):
        _call(scales_lk2=jnp.ones((1, 2, 2)))


@pytest.mark.parametrize(("window", "cap", "field"), [(0, None, "sliding_window"), (None, 0.0, "soft_cap")])
def test_limits_of_the_spec(window: int | None, cap: float | None, field: str) -> None:
    layout = KVLayout(1, 4, 8, 2, 16, jnp.dtype("float32"))
    with pytest.raises(InvalidArgument, match=field):
        AttentionSpec(layout, AttentionKind(1.0, window, cap))
