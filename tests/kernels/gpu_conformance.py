"""What the suites of the kernels for GPUs have in common, which run in interpreters here."""

from __future__ import annotations

import dataclasses

import pytest

from jpaged.kernels.paged_attention.measure import SHAPES
from jpaged.kernels.paged_attention.spec import AttentionCall
from tests.kernels.attention_conformance import (
    RAGGED,
    BackendUnderTest,
    PagedAttentionSizes,
    Shape,
    real_shape,
)


class GpuBackend(BackendUnderTest):
    """The conformance suite's calls with a pool of form gpu, where XLA stores keys and values before the kernel."""

    form = "gpu"

    def update(self, q, new_kv, pool, layer, rows, spec, scales):
        new_kv = AttentionCall(q, pool, layer, rows, spec, scales).scaled(new_kv)
        pool = spec.layout.write(pool, layer, *new_kv)
        return *self.attend(q, pool, layer, rows, spec, scales), pool


class GpuSizes(GpuBackend, PagedAttentionSizes):
    """Every size by itself, the heads of published models and what only GPUs multiply."""

    @pytest.mark.parametrize("name", SHAPES)
    def test_real_head_shapes(self, name: str) -> None:
        self.check(RAGGED["mixed"], real_shape(name, "bfloat16"))

    @pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3fn"])
    @pytest.mark.parametrize("head_dim", [64, 256])
    def test_half_precision(self, head_dim: int, kv_dtype: str | None) -> None:
        self.check(RAGGED["mixed"], Shape(dtype="float16", kv_dtype=kv_dtype, head_dim=head_dim))


@dataclasses.dataclass(frozen=True)
class Device:
    """What a backend asks a device."""

    platform: str
    device_kind: str
    compute_capability: str
