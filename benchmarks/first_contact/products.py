"""Quantized matmuls, experts and sampling on the device, against NumPy or XLA on the CPU.

On a CPU the Triton kernels run in Pallas' interpreter, and sampling is the CPU kernel's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.first_contact.attention import cuda_programs, triton_programs
from benchmarks.first_contact.cells import Cells, NotOnThisPlatform, Program, Values, WrongNumbers
from jpaged.config import Backend
from jpaged.device import sampling
from jpaged.device.mesh import build_mesh, replicated
from jpaged.device.model_runner import unpack_rows
from jpaged.device.sampling import SamplingVocabulary
from jpaged.engine.executor import BEYOND_TOKENS, Detail, SamplingInputs
from jpaged.kernels import cuda_library
from jpaged.kernels.cuda_library import unsupported_gpu_reason
from jpaged.kernels.experts import ExpertsBackend, ExpertWeights, Routes, sorted_rows, sum_experts
from jpaged.kernels.matmul.on_device import kernel_takes, multiply_on_device
from jpaged.kernels.matmul.quantized import QuantizedMatrix, dequantize, quantize, rows_on_device
from jpaged.kernels.matmul.triton.grouped import ProductBackend, multiply_one, multiply_sorted
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.kernels.mixture_kind import SILU
from jpaged.kernels.sampling import RowSampling, SampledTokens, choose_kernel

FORMATS: Mapping[str, MatrixFormat] = {
    "int4 groups": MatrixFormat("int4", 128, has_zeros=True),
    "mxfp4": MatrixFormat("mxfp4", 32),
    "fp8 blocks": MatrixFormat("fp8", 128, activations="fp8-groups"),
    "fp8 rows": MatrixFormat("fp8", activations="fp8"),
    "int8 rows": MatrixFormat("int8", activations="int8"),
    "int8 groups": MatrixFormat("int8", 128, has_zeros=True),
    "int8": MatrixFormat("int8"),
    "int4 rows": MatrixFormat("int4", 128, activations="int8"),
}
TOLERANCE = 5e-3
"""Largest norm of a difference over the norm of the result: tensor cores add products of 8-bit floats in few bits."""
_TINY_FORMATS = ("int4 groups", "int8 rows")
_SIZES = {"full": (48, 2048, 2048), "tiny": (5, 128, 32)}  # rows, depth, columns
_EXPERTS = {"full": (16, 1024, 768, 4, (5, 64, 300)), "tiny": (4, 64, 32, 2, (5,))}  # X, E, F, K and tokens
_SAMPLING = {"full": (32, 128_256), "tiny": (8, 512)}  # rows, tokens of the vocabulary
_SAME_SHARE = 0.98
"""Sampled tokens that must be equal: the others have scores that differ by rounding."""
_BACKENDS: Mapping[str, Backend] = {"cpu": "cpu", "tpu": "pallas-tpu", "gpu": "xla"}


def check(cells: Cells, size: str) -> None:
    """Check the Triton and CUDA kernels, the experts, the quantized matmuls and sampling."""
    attention, products = triton_programs(size), product_programs(size)
    experts, sampled = expert_programs(size), sampling_programs(size)
    cells.run_programs({**attention, **cuda_programs(), **products, **experts, **sampled})


def product_programs(size: str) -> dict[str, Program]:
    """Return the cells of the quantized matmuls."""
    names = FORMATS if size == "full" else _TINY_FORMATS
    found = {f"matmul, {name}": _program(functools.partial(_product, FORMATS[name], *_SIZES[size])) for name in names}
    in_cuda = FORMATS if size == "full" else {}
    return found | {
        f"matmul in CUDA, {name}": _program(functools.partial(_product_in_cuda, form, *_SIZES[size]))
        for name, form in in_cuda.items()
    }


def expert_programs(size: str) -> dict[str, Program]:
    """Return the cells of the experts: matrices of 16 bits, and of 4."""
    *shape, counts = _EXPERTS[size]
    forms: dict[str, MatrixFormat | None] = {"bfloat16": None}
    forms |= {"mxfp4": FORMATS["mxfp4"], "fp8 blocks": FORMATS["fp8 blocks"]} if size == "full" else {}
    return {
        f"experts, {name}, {count} rows": _program(functools.partial(_experts, form, shape, count))
        for name, form in forms.items()
        for count in (counts if form is None else counts[:2])
    }


def sampling_programs(size: str) -> dict[str, Program]:
    """Return the cells of sampling: greedy rows, and rows with every truncation."""
    ways = {"greedy": Detail.TOKENS, "truncated": Detail.TOKENS, "log-probabilities": Detail.TOP_LOGPROBS}
    return {
        f"sampling, {name}": _program(functools.partial(_sampling, name == "greedy", detail, *_SAMPLING[size]))
        for name, detail in ways.items()
    }


def _program(compile_one: Callable[[], Callable[[], Values]]) -> Program:
    return Program(compile_one, lambda run: run())


def _compiled(act: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Compile for the first device, and return the call with the arguments there.

    The first call compiles: a program that is compiled before its call does not accept numbers of 4 bits on CPUs.
    """
    mesh = build_mesh(jax.devices()[:1])
    arguments, jitted = jax.device_put(arguments, replicated(mesh)), jax.jit(act)

    def call() -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jitted(*arguments)

    jax.block_until_ready(call())
    return call


def compare(got: np.ndarray, want: np.ndarray) -> Values:
    """Return the relative error of a result.

    Raises:
        WrongNumbers: it is above `TOLERANCE`, or a number is not finite.
    """
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    if not error <= TOLERANCE:
        raise WrongNumbers(f"relative error {error:.3g}; the limit is {TOLERANCE:g}")
    return {"relative_error": error}


def _normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def _product_in_cuda(form: MatrixFormat, num_rows: int, depth: int, columns: int) -> Callable[[], Values]:
    reason = unsupported_gpu_reason(jax.devices()[0]) or cuda_library.unusable_reason()
    if reason is not None:
        raise NotOnThisPlatform(reason)
    return _product(form, num_rows, depth, columns, "cuda")


def _product(
    form: MatrixFormat, num_rows: int, depth: int, columns: int, backend: ProductBackend | None = None
) -> Callable[[], Values]:
    is_cpu = jax.devices()[0].platform == "cpu"
    matrix = quantize(_normal((depth, columns), 1) * depth**-0.5, form, dtype=np.dtype(jnp.bfloat16))
    x = jnp.asarray(_normal((num_rows, depth), 2), jnp.bfloat16)

    def act(x: jax.Array, matrix: QuantizedMatrix) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        rows, scales = rows_on_device(x, matrix)
        if is_cpu or backend is not None:
            return multiply_one(rows, scales, matrix, backend=backend, is_interpreted=is_cpu), rows, scales
        return multiply_on_device(x, matrix), rows, scales

    call = _compiled(act, x, matrix)
    weights = np.asarray(dequantize(matrix, np.dtype(np.float32)), np.float64)

    def run() -> Values:
        y, rows, scales = call()
        wide = np.asarray(rows, np.float64)
        if scales is not None:
            wide = wide * np.repeat(np.asarray(scales, np.float64), depth // scales.shape[-1], axis=-1)
        has_kernel = is_cpu or backend is not None or kernel_takes(matrix, jax.devices()[0])
        return {**compare(np.asarray(y, np.float64), wide @ weights), "has_kernel": has_kernel}

    return run


def _experts(form: MatrixFormat | None, shape: list[int], num_tokens: int) -> Callable[[], Values]:
    num_experts, width, inner, top_k = shape
    kernels = [
        _normal((num_experts, *dims), seed) * dims[0] ** -0.5
        for seed, dims in enumerate([(width, inner), (width, inner), (inner, width)])
    ]
    if form is None:
        matrices: list[Any] = [jnp.asarray(kernel, jnp.bfloat16) for kernel in kernels]
        wide = [np.asarray(matrix, np.float64) for matrix in matrices]
    else:
        matrices = [quantize(kernel, form, axis=-2, dtype=np.dtype(jnp.bfloat16)) for kernel in kernels]
        wide = [np.asarray(dequantize(matrix, np.dtype(np.float32)), np.float64) for matrix in matrices]
    rng = np.random.default_rng(num_tokens)
    ids = np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :top_k].astype(np.int32)
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    x = jnp.asarray(_normal((num_tokens, width), 5), jnp.bfloat16)
    call = _compiled(_apply, x, Routes(jnp.asarray(ids), jnp.asarray(weights)), ExpertWeights(*matrices))
    want, x_te = np.zeros((num_tokens, width)), np.asarray(x, np.float64)
    for expert in range(num_experts):
        tokens, places = np.nonzero(ids == expert)
        gates, ups = x_te[tokens] @ wide[0][expert], x_te[tokens] @ wide[1][expert]
        hidden = (gates / (1 + np.exp(-gates)) * ups).astype(jnp.bfloat16).astype(np.float64)
        want[tokens] += weights[tokens, places, None] * (hidden @ wide[2][expert])
    tolerance = 1 if form is None or form.activations is None else 10
    return lambda: _compare_experts(np.asarray(call(), np.float64), want, tolerance)


def _compare_experts(got: np.ndarray, want: np.ndarray, factor: int) -> Values:
    """Compare with a result of rows that were not rounded to 8 bits, if the matrices round them, more loosely."""
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    if not error <= factor * TOLERANCE:
        raise WrongNumbers(f"relative error {error:.3g}; the limit is {factor * TOLERANCE:g}")
    return {"relative_error": error}


def _apply(x_te: jax.Array, routes: Routes, weights: ExpertWeights) -> jax.Array:
    platform = jax.devices()[0].platform
    if platform == "cpu":
        multiply = functools.partial(multiply_sorted, is_interpreted=True)
        return sorted_rows.apply_grouped(x_te, routes, weights, SILU, multiply)
    backend: ExpertsBackend = "ragged" if platform == "tpu" else "triton"
    return sum_experts(x_te, routes, weights, SILU, backend)


def _sampling(is_greedy: bool, detail: Detail, num_rows: int, vocab_size: int) -> Callable[[], Values]:
    device = jax.devices()[0]
    kernel = choose_kernel(_BACKENDS[device.platform], 1, vocab_size)
    inputs = SamplingInputs.neutral(num_rows)
    if not is_greedy:
        inputs.fill_columns(
            range(num_rows),
            {
                "temperature_r": [(1.0, 0.7, 0.0, 1.3)[i % 4] for i in range(num_rows)],
                "top_k_r": [(BEYOND_TOKENS, 50, BEYOND_TOKENS)[i % 3] for i in range(num_rows)],
                "top_p_r": [(0.9, 1.0)[i % 2] for i in range(num_rows)],
                "min_p_r": [(0.0, 0.0, 0.0, 0.0, 0.02)[i % 5] for i in range(num_rows)],
                "seeds_r2": [(i, 7 * i + 1) for i in range(num_rows)],
                "positions_r": [100 + i for i in range(num_rows)],
            },
        )
    logits, words = _normal((num_rows, vocab_size), 3) * 3, np.array(inputs.words)

    def act(kernel: Any, logits: jax.Array, words: jax.Array) -> SampledTokens:
        how = RowSampling(**unpack_rows(words))
        return sampling.sample(logits, how, SamplingVocabulary(vocab_size), detail, kernel)

    call = _compiled(functools.partial(act, kernel), logits, words)
    reference = jax.jit(functools.partial(act, None))
    on_cpu = jax.device_put((logits, words), jax.devices("cpu")[0])
    want = jax.block_until_ready(reference(*on_cpu))
    return lambda: _compare_samples(call(), want, is_greedy=is_greedy)


def _compare_samples(got: SampledTokens, want: SampledTokens, *, is_greedy: bool) -> Values:
    same = np.asarray(got.token_ids_r) == np.asarray(want.token_ids_r)
    if not bool(np.asarray(got.is_sound_r).all()):
        raise WrongNumbers("a row is not sound")
    if same.mean() < (1 if is_greedy else _SAME_SHARE):
        raise WrongNumbers(f"{int((~same).sum())} of {len(same)} tokens differ from those of the CPU")
    if got.logprobs_r is None or want.logprobs_r is None:
        return {"same_tokens": float(same.mean())}
    error = float(np.abs(np.asarray(got.logprobs_r) - np.asarray(want.logprobs_r))[same].max())
    if error > 1e-4:
        raise WrongNumbers(f"log-probabilities differ by {error:.3g}; the limit is 1e-4")
    return {"same_tokens": float(same.mean()), "logprob_error": error}
