"""The attention calls of a first run in their full sizes are lowered for an H200, without one."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import pytest
from jax import export

# How an abstract mesh says which device it is of has no public name yet.
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh

from benchmarks.first_contact.attention import CUDA, MOSAIC, TRITON, attend_problem, compiled_attend
from benchmarks.first_contact.problem import NUM_LAYERS, Problem, layout_of, spec_of, table_shape
from jpaged.config import Backend
from jpaged.kernels.cuda_library import TARGET

TRITON_CALL = "__gpu$xla.gpu.triton"
CALLS = {"pallas-gpu": "mosaic_gpu_v2", "pallas-triton": TRITON_CALL, "cuda": TARGET}
H200 = AbstractMesh((1,), ("model",), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))


def lower(backend: Backend, problem: Problem) -> str:
    heads, layout = problem.heads, layout_of(problem, "gpu")
    q = jax.ShapeDtypeStruct((problem.num_tokens, heads.num_heads, heads.head_dim), jnp.dtype(heads.dtype))
    pool = jax.ShapeDtypeStruct(layout.shape, layout.storage_dtype)
    tables = jax.ShapeDtypeStruct(table_shape(problem), jnp.int32)
    scales = jax.ShapeDtypeStruct((NUM_LAYERS, heads.num_kv_heads, 2), jnp.float32) if layout.is_scaled else None
    act = functools.partial(attend_problem, compiled_attend(backend), problem, spec_of(problem, layout))
    checks = [export.DisabledSafetyCheck.custom_call(call) for call in (TRITON_CALL, TARGET)]
    with jax.sharding.use_abstract_mesh(H200):
        exported = export.export(jax.jit(act), platforms=["cuda"], disabled_checks=checks)(q, pool, tables, scales)
    return exported.mlir_module()


def check(backend: Backend, problems: Mapping[str, Problem], name: str) -> None:
    text = lower(backend, problems[name])
    assert f"custom_call @{CALLS[backend]}(" in text


@pytest.mark.long
@pytest.mark.parametrize("name", MOSAIC)
def test_every_call_of_the_mosaic_kernel_is_lowered(name: str) -> None:
    check("pallas-gpu", MOSAIC, name)


@pytest.mark.long
@pytest.mark.parametrize("name", TRITON)
def test_every_call_of_the_triton_kernel_is_lowered(name: str) -> None:
    check("pallas-triton", TRITON, name)


@pytest.mark.long
@pytest.mark.parametrize("name", CUDA)
def test_every_call_of_the_cuda_kernels_is_lowered(name: str) -> None:
    check("cuda", CUDA, name)
