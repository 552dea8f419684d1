"""The Hopper kernel passes Mosaic's lowering for CUDA, with the plain wheels of jax and without a GPU."""

from __future__ import annotations

import functools

import jax
import pytest
from jax import export

# How an abstract mesh says which device it is of has no public name yet.
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh

from benchmarks.aot_gpu.cases import ATTENTION, AttentionCase, attend
from jpaged.errors import Unsupported

H200 = AbstractMesh((1,), ("model",), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))

QUICK = (
    AttentionCase(),
    AttentionCase(num_tokens=8, num_rows=8, kv_dtype="int8"),
    AttentionCase(8, 4, 256, block_size=48, num_tokens=512, dtype="float16", sliding_window=100, soft_cap=50.0),
    AttentionCase(14, 2, 64, kv_dtype="float8_e4m3fn", num_tokens=512),
)


def lower(case: AttentionCase) -> str:
    with jax.sharding.use_abstract_mesh(H200):
        jitted = jax.jit(functools.partial(attend, spec=case.spec()), donate_argnums=0)
        return export.export(jitted, platforms=["cuda"])(*case.arguments()).mlir_module()


def check(case: AttentionCase) -> None:
    text = lower(case)
    assert text.count("custom_call @mosaic_gpu_v2(") == 1
    # Its code is in the call as text: products of the tensor core, and copies that signal barriers.
    assert "wgmma" in text
    assert "cp.async.bulk" in text or "mbarrier" in text


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_the_kernel_is_lowered(case: AttentionCase) -> None:
    check(case)


@pytest.mark.long
@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_the_whole_matrix_is_lowered(case: AttentionCase) -> None:
    check(case)


def test_more_than_shared_memory_holds_is_refused_before_lowering() -> None:
    with pytest.raises(Unsupported, match="the limit is 232448"):
        lower(AttentionCase(head_dim=256, block_size=128))
