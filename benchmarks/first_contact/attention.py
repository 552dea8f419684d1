"""Attention kernels against the oracle: every type of the pool, shared prefixes, and contexts of 32k.

On a CPU the GPU kernels run in Pallas' interpreters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.first_contact.cells import Cells, NotOnThisPlatform, Program, Values, WrongNumbers
from benchmarks.first_contact.problem import (
    LAYER,
    LSE_TOLERANCE,
    TOLERANCE,
    Heads,
    Problem,
    draw,
    expected,
    fill,
    parts_of,
    spec_of,
)
from jpaged.config import Backend
from jpaged.device.mesh import build_mesh, replicated
from jpaged.kernels.kv_layout import KVForm
from jpaged.kernels.paged_attention.api import IMPLEMENTATIONS, implementation
from jpaged.kernels.paged_attention.spec import Attended, AttentionCall, AttentionSpec, ContextPart, merge

Attend = Callable[[AttentionCall, Sequence[ContextPart]], Attended]

_MIXED = ((1, 33), (7, 7), (1, 1), (20, 90), (1, 160), (70, 300), (1, 2000))
_TINY_ROWS = ((1, 33), (7, 7), (5, 20))
_DECODES = ((1, 4100), (1, 4217), (1, 5000), (1, 4096 + 16), (3, 4200), (1, 4400))
_LATENTS = Heads(16, 1, 576, value_dim=512)

MOSAIC: Mapping[str, Problem] = {
    "bfloat16": Problem(Heads(), _MIXED),
    "int8": Problem(Heads(kv_dtype="int8"), _MIXED),
    "fp8": Problem(Heads(kv_dtype="float8_e4m3fn"), _MIXED),
    "float16": Problem(Heads(dtype="float16", kv_dtype="float16"), _MIXED),
    "32k decode": Problem(Heads(16, 2), ((1, 32_000), (1, 32_768), (1, 20_001), (1, 17))),
    "cascade": Problem(Heads(), _DECODES, shared=4096),
    "chunk": Problem(Heads(), ((512, 1500), (9, 9))),
    "32k chunk": Problem(Heads(8, 2), ((192, 32_000),)),
    "32k decode int8": Problem(Heads(16, 2, kv_dtype="int8"), ((1, 32_000), (1, 32_768))),
    "32k decode fp8": Problem(Heads(16, 2, kv_dtype="float8_e4m3fn"), ((1, 32_000), (1, 32_768))),
    "cascade int8": Problem(Heads(kv_dtype="int8"), _DECODES, shared=4096),
    "cascade fp8": Problem(Heads(kv_dtype="float8_e4m3fn"), _DECODES, shared=4096),
    "cascade in a window": Problem(Heads(window=4000), _DECODES, shared=4096),
    "chunk fp8": Problem(Heads(kv_dtype="float8_e4m3fn"), ((512, 1500), (9, 9))),
    "chunk int8": Problem(Heads(kv_dtype="int8"), ((512, 1500), (9, 9))),
    "heads of 64": Problem(Heads(14, 2, 64), _MIXED),
    "heads of 256, window and cap": Problem(Heads(8, 4, 256, window=100, soft_cap=50.0), _MIXED),
    "float16 with int8": Problem(Heads(dtype="float16", kv_dtype="int8"), _MIXED),
    "blocks of 32": Problem(Heads(block_size=32), _MIXED),
    "blocks of 128": Problem(Heads(block_size=128), _MIXED),
}
TRITON: Mapping[str, Problem] = {
    "bfloat16": Problem(Heads(), _MIXED),
    "float32": Problem(Heads(dtype="float32", kv_dtype="float32"), _MIXED),
    "int8": Problem(Heads(kv_dtype="int8"), _MIXED),
    "fp8": Problem(Heads(kv_dtype="float8_e4m3fn"), _MIXED),
    "latents": Problem(_LATENTS, _MIXED),
    "latents fp8": Problem(Heads(16, 1, 576, kv_dtype="float8_e4m3fn", value_dim=512), _MIXED),
    "latents, cascade": Problem(_LATENTS, _DECODES, shared=4096),
    "cascade": Problem(Heads(), _DECODES, shared=4096),
    "32k decode": Problem(Heads(16, 2), ((1, 32_000), (1, 32_768))),
}
CUDA = {name: TRITON[name] for name in ("bfloat16", "float32", "int8", "fp8", "cascade", "32k decode")}
_TINY = Heads(4, 2, 64)
TINY_MOSAIC: Mapping[str, Problem] = {
    "bfloat16": Problem(_TINY, _TINY_ROWS),
    "fp8": Problem(Heads(4, 2, 64, kv_dtype="float8_e4m3fn"), _TINY_ROWS),
    "cascade": Problem(_TINY, ((1, 40), (1, 37)), shared=32),
}
TINY_TRITON: Mapping[str, Problem] = {
    "int8": Problem(Heads(4, 2, 32, kv_dtype="int8"), _TINY_ROWS),
    "latents": Problem(Heads(4, 1, 96, value_dim=64), _TINY_ROWS),
}


def check_mosaic(cells: Cells, size: str) -> None:
    """Check the Mosaic kernel; on a TPU, that of TPUs."""
    backend: Backend = "pallas-tpu" if jax.devices()[0].platform == "tpu" else "pallas-gpu"
    problems = MOSAIC if size == "full" else TINY_MOSAIC
    cells.run_programs({name: attention_program(backend, problem) for name, problem in problems.items()})


def triton_programs(size: str) -> dict[str, Program]:
    """Return the cells of the Triton kernel."""
    problems = TRITON if size == "full" else TINY_TRITON
    return {f"attention, {name}": attention_program("pallas-triton", problem) for name, problem in problems.items()}


def cuda_programs() -> dict[str, Program]:
    """Return the cells of the CUDA kernels, which no CPU runs without the tests' emulation."""
    return {f"attention in CUDA, {name}": attention_program("cuda", problem) for name, problem in CUDA.items()}


def attention_program(backend: Backend, problem: Problem) -> Program:
    """Return the cell of a problem."""
    return Program(functools.partial(_compile, backend, problem), lambda run: run())


def choose_attend(backend: Backend, device: jax.Device) -> tuple[Attend, bool]:
    """Return the kernel's function for this device, and whether it is interpreted.

    Raises:
        NotOnThisPlatform: the kernel does not run here.
    """
    if device.platform == "cpu" and backend == "pallas-gpu":
        # Without a public name before jax 0.11.
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        from jpaged.kernels.paged_attention.gpu import attention as gpu

        return functools.partial(gpu.attend_parts, interpret=InterpretGPUParams()), True
    if device.platform == "cpu" and backend == "pallas-triton":
        from jpaged.kernels.paged_attention.triton import attention as triton

        return functools.partial(triton.attend_parts, is_interpreted=True), True
    if (reason := IMPLEMENTATIONS[backend].unsupported_device_reason(device)) is not None:
        raise NotOnThisPlatform(reason)
    return compiled_attend(backend), False


def compiled_attend(backend: Backend) -> Attend:
    """Return the kernel's function for its own devices."""

    def attend(call: AttentionCall, parts: Sequence[ContextPart]) -> Attended:
        run = implementation(backend, call.spec, call.queries)
        if run.attend_parts is not None:
            return run.attend_parts(call, parts)
        results = [
            run.attend(AttentionCall(call.q_thd, call.pool, call.layer, part.rows, part.spec, call.scales_lk2))
            for part in parts
        ]
        return functools.reduce(merge, results)

    return attend


def _compile(backend: Backend, problem: Problem) -> Callable[[], Values]:
    """Draw the numbers, compute the expected results and compile the programs; return what runs them."""
    device = jax.devices()[0]
    attend, is_interpreted = choose_attend(backend, device)
    form: KVForm = IMPLEMENTATIONS[backend].form or "gpu"
    numbers = draw(problem, form)
    spec, dtype = spec_of(problem, numbers.layout), problem.heads.dtype
    where = replicated(mesh := build_mesh([device]))
    filling = [None if x is None else jax.device_put(x, where) for x in (numbers.k_nkd, numbers.v_nkd, numbers.slots_n)]
    q_thd = jax.device_put(jnp.asarray(numbers.q_thd, dtype), where)
    tables = jax.device_put(numbers.tables_sm, where)
    scales = None if numbers.scales_lk2 is None else jax.device_put(numbers.scales_lk2, where)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        fill_pool = jax.jit(functools.partial(fill, numbers.layout)).lower(*filling).compile()
        pool = jax.ShapeDtypeStruct(numbers.layout.shape, numbers.layout.storage_dtype, sharding=where)
        act = functools.partial(attend_problem, attend, problem, spec)
        lowered = jax.jit(act).lower(q_thd, pool, tables, scales)
    program = lowered.compile()
    poison = jax.jit(functools.partial(_nans, lowered.out_info, program)).lower().compile()
    want = expected(problem, numbers)

    def run() -> Values:
        filled = fill_pool(*filling)
        results = []
        for _ in range(2):
            for array in jax.block_until_ready([poison() for _ in range(2)]):
                jax.tree.map(lambda leaf: leaf.delete(), array)
            results.append([np.asarray(x, np.float32) for x in program(q_thd, filled, tables, scales)])
        if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*results, strict=True)):
            raise WrongNumbers("two runs with the same arguments differ")
        return {**compare(results[0], want, dtype), **({"interpreted": True} if is_interpreted else {})}

    return run


def attend_problem(
    attend: Attend,
    problem: Problem,
    spec: AttentionSpec,
    q_thd: jax.Array,
    pool: jax.Array,
    tables_sm: jax.Array,
    scales_lk2: jax.Array | None,
) -> Attended:
    """Attend to a problem's rows; the traced program that is checked."""
    parts = parts_of(problem, tables_sm, spec)
    return attend(AttentionCall(q_thd, pool, LAYER, parts[0].rows, parts[0].spec, scales_lk2), parts)


def _nans(results: Any, program: Any) -> tuple[jax.Array, ...]:
    """Return arrays of NaN of the sizes that a program allocates: memory that its results get."""
    analysis = program.memory_analysis()
    temporary = 0 if analysis is None else analysis.temp_size_in_bytes
    nans = [jnp.full(one.shape, jnp.nan, one.dtype) for one in jax.tree.leaves(results)]
    return *nans, jnp.full((max(1, temporary // 4),), jnp.nan)


def compare(got: Sequence[np.ndarray], want: Sequence[np.ndarray], dtype: str) -> Values:
    """Return the differences of outputs and log-sum-exps.

    Raises:
        WrongNumbers: a difference is above the limit, or a number is not finite where the oracle's is.
    """
    (o, lse), (want_o, want_lse) = got, want
    seen = np.isfinite(want_lse)
    is_wrong = np.where(seen, ~np.isfinite(lse), lse != -np.inf)
    if is_wrong.any() or not np.isfinite(o).all():
        wrong = int(is_wrong.sum()), int((~np.isfinite(o)).sum())
        raise WrongNumbers(f"{wrong[0]} log-sum-exps and {wrong[1]} outputs are not finite, or should not be")
    errors = np.abs(o - want_o)
    lse_error = float(np.abs(lse[seen] - want_lse[seen]).max(initial=0))
    relative = float(np.linalg.norm(o - want_o) / max(float(np.linalg.norm(want_o)), 1e-30))
    values = {"max_error": float(errors.max()), "relative_error": relative, "lse_error": lse_error}
    excess = float((errors - TOLERANCE[dtype] * (1 + np.abs(want_o))).max())
    lse_excess = float(
        (np.abs(lse[seen] - want_lse[seen]) - LSE_TOLERANCE * (1 + np.abs(want_lse[seen]))).max(initial=0)
    )
    if excess > 0 or lse_excess > 0:
        raise WrongNumbers(", ".join(f"{name} {value:.3g}" for name, value in values.items()))
    return values
