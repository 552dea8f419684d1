"""Mixtures of experts, by all who compute them: results against float64, and rows that never show in each other."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.kernels.experts import ExpertWeights, Routes, StackedExperts, apply_experts, sorted_rows, sum_experts
from jpaged.kernels.experts.cpu import experts as cpu
from jpaged.kernels.experts.cpu.experts import CpuExperts
from jpaged.kernels.matmul import can_pack_experts
from jpaged.kernels.matmul.quantized import MatrixFormat, dequantize, quantize
from jpaged.kernels.matmul.triton.grouped import multiply_sorted
from jpaged.kernels.mixture_kind import SILU, GateFunction
from tests.conftest import QUICK_XLA_OPTIONS
from tests.kernels.experts import reference
from tests.kernels.experts.mixtures import CLAMPED, expected, mixture, numbers, packed, random_routes
from tests.kernels.matmul.test_product_quantized_cpu import rounded_by_spans

Who = Literal["reference", "tiles", "wide-tiles", "ragged", "triton", "cpu"]
SHAPES = ((1, 1, 1, 1), (5, 40, 72, 3), (8, 97, 33, 2), (16, 64, 32, 16))
"""Experts, width, inner width, experts of a row."""
AS_SERVED = {name: "3" if isinstance(value, str) else True for name, value in QUICK_XLA_OPTIONS.items()}
"""As a server compiles: what is hardly optimised adds up in another order with another number of rows."""
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2.5e-3}


def run(
    who: Who, x: Any, routes: Routes, weights: ExpertWeights, gate: GateFunction = SILU, options: Any = None
) -> np.ndarray:
    if who == "reference":
        called = functools.partial(reference.apply_experts, gate=gate)
    elif who == "ragged":
        called = functools.partial(apply_experts, gate=gate, kernel=sorted_rows.apply_grouped)
    elif who == "triton":
        multiply = functools.partial(multiply_sorted, is_interpreted=True)
        kernel = functools.partial(sorted_rows.apply_grouped, multiply=multiply)
        called, options = functools.partial(apply_experts, gate=gate, kernel=kernel), QUICK_XLA_OPTIONS
    elif who == "cpu":
        called, weights = functools.partial(apply_experts, gate=gate), packed(weights)
    else:
        called = functools.partial(apply_experts, gate=gate, kernel=functools.partial(sum_experts, backend=who))
    return np.asarray(jax.jit(called, compiler_options=options)(jnp.asarray(x), routes, weights))


@pytest.mark.parametrize("who", ["tiles", "ragged", "cpu"])
def test_gates_of_gelu_are_approximated_by_tanh(who: Who) -> None:
    weights = mixture(5, 40, 72, "float32")
    x, routes = numbers((21, 40), "float32"), random_routes(21, 5, 3)
    gate = GateFunction("gelu_tanh")
    want = expected(x, routes, weights, gate)
    np.testing.assert_allclose(run(who, x, routes, weights, gate), want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("who", ["tiles", "ragged", "cpu"])
def test_experts_without_gates_square_what_is_positive(who: Who) -> None:
    found = mixture(5, 40, 72, "float32")
    weights = dataclasses.replace(found, gate=found.up, gate_bias=found.up_bias)
    x, routes = numbers((21, 40), "float32"), random_routes(21, 5, 3)
    gate = GateFunction("relu2")
    want = expected(x, routes, weights, gate)
    np.testing.assert_allclose(run(who, x, routes, weights, gate), want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("gate", [SILU, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.long)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("who", ["tiles", "wide-tiles", "ragged", "cpu"])
@pytest.mark.thinned(22)
def test_rows_become_what_float64_makes_of_them(
    who: Who, shape: tuple[int, int, int, int], dtype: str, gate: GateFunction
) -> None:
    num_experts, width, inner, top_k = shape
    weights = mixture(num_experts, width, inner, dtype)
    for num_tokens in (1, 21):
        x, routes = numbers((num_tokens, width), dtype), random_routes(num_tokens, num_experts, top_k)
        want = expected(x, routes, weights, gate)
        got = run(who, x, routes, weights, gate)
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[dtype] * max(1.0, np.abs(want).max()))


@pytest.mark.parametrize(
    ("dtype", "gate"),
    [("float32", CLAMPED), ("bfloat16", SILU), pytest.param("float16", CLAMPED, marks=pytest.mark.long)],
)
def test_the_kernel_of_gpus_makes_the_same_of_rows(dtype: str, gate: GateFunction) -> None:
    weights, x, routes = mixture(5, 40, 72, dtype), numbers((21, 40), dtype), random_routes(21, 5, 3)
    want = expected(x, routes, weights, gate)
    got = run("triton", x, routes, weights, gate)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[dtype] * max(1.0, np.abs(want).max()))


def test_the_specification_is_what_float64_makes_of_rows() -> None:
    weights, x, routes = mixture(6, 24, 40, "float32"), numbers((9, 24), "float32"), random_routes(9, 6, 2, 7)
    without_last_bias = ExpertWeights(weights.gate, weights.up, weights.down, weights.gate_bias, weights.up_bias)
    want = expected(x, routes, without_last_bias, CLAMPED)
    np.testing.assert_allclose(run("reference", x, routes, without_last_bias, CLAMPED), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("who", ["tiles", "ragged", "cpu"])
def test_experts_without_biases_have_none(who: Who) -> None:
    weights, x, routes = (
        mixture(4, 16, 48, "float32", has_biases=False),
        numbers((5, 16), "float32"),
        random_routes(5, 4, 2),
    )
    np.testing.assert_allclose(run(who, x, routes, weights), expected(x, routes, weights, SILU), rtol=0, atol=1e-5)


@pytest.mark.parametrize("who", ["tiles", "ragged", "triton", "cpu"])
def test_rows_that_are_not_in_use_are_zeros_whatever_lies_in_them(who: Who) -> None:
    weights, x, routes = mixture(4, 16, 48, "float32"), numbers((12, 16), "float32"), random_routes(12, 4, 2, 5)
    want = expected(x, routes, weights, SILU)
    x[5:] = np.nan
    got = run(who, x, routes, weights)
    np.testing.assert_allclose(got[:5], want[:5], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(got[5:], 0)


@pytest.mark.parametrize("who", ["tiles", "ragged", "cpu"])
def test_all_rows_may_share_one_expert(who: Who) -> None:
    """There is no capacity: none is dropped."""
    weights, x = mixture(8, 16, 32, "float32"), numbers((50, 16), "float32")
    routes = Routes(jnp.full((50, 1), 6, jnp.int32), jnp.ones((50, 1)))
    np.testing.assert_allclose(run(who, x, routes, weights), expected(x, routes, weights, SILU), rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("who", "dtype"), [("cpu", "float32"), ("cpu", "bfloat16"), ("cpu", "float16"), ("tiles", "float32")]
)
def test_neither_the_other_rows_nor_their_number_show_in_a_bit(who: Who, dtype: str) -> None:
    weights, x, routes = mixture(8, 96, 200, dtype), numbers((128, 96), dtype), random_routes(128, 8, 3)

    def rows(part: slice) -> np.ndarray:
        return run(who, x[part], Routes(routes.ids_tk[part], routes.weights_tk[part]), weights, options=AS_SERVED)

    first, last = rows(slice(1))[0], rows(slice(127, None))[0]
    for count in (2, 33, 128):
        assert rows(slice(count))[0].tobytes() == first.tobytes(), count
        assert rows(slice(-count, None))[-1].tobytes() == last.tobytes(), count


@pytest.mark.parametrize("max_width", [16, 8, 4])
def test_every_width_of_vectors_and_number_of_threads_gives_the_same_rows(
    max_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, x, routes = mixture(6, 128, 320, "float32"), numbers((40, 128), "float32"), random_routes(40, 6, 2)
    assert isinstance(cpu.kernel(), CpuExperts)  # which registers what all of them call
    found = []
    for max_threads in (1, 2, 0):
        monkeypatch.setattr(cpu, "kernel", lambda limits=(max_width, max_threads): CpuExperts(*limits))
        found.append(run("cpu", x, routes, weights))
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()
    np.testing.assert_allclose(found[0], expected(x, routes, weights, SILU), rtol=0, atol=2e-5)


@pytest.mark.parametrize("who", ["tiles", "ragged"])
def test_experts_of_several_layers_are_told_apart(who: Who) -> None:
    layers = [mixture(4, 16, 24, "float32"), mixture(4, 24, 16, "float32")]
    weights, x, routes = layers[0], numbers((9, 16), "float32"), random_routes(9, 4, 2)
    others = ExpertWeights(*(jnp.swapaxes(matrix, 1, 2) for matrix in (layers[1].gate, layers[1].up, layers[1].down)))
    names = ("gate", "up", "down")
    stacks = {name: jnp.stack([getattr(others, name), getattr(weights, name)]) for name in names}
    stacked: dict[str, Any] = {name: StackedExperts(stack, jnp.int32(1)) for name, stack in stacks.items()}
    got = run(who, x, routes, dataclasses.replace(weights, **stacked))
    np.testing.assert_array_equal(got, run(who, x, routes, weights))


def test_routes_to_a_part_of_the_experts_add_up_to_all() -> None:
    weights, x, routes = mixture(6, 16, 32, "float32"), numbers((9, 16), "float32"), random_routes(9, 6, 3)
    parts = []
    for first in (0, 3):
        own = ExpertWeights(*(array[first : first + 3] for array in _arrays(weights)))
        parts.append(run("tiles", x, routes.part(jnp.int32(first), 3), own))
    np.testing.assert_allclose(sum(parts), run("tiles", x, routes, weights), rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", [MatrixFormat("int8"), MatrixFormat("int4", group_size=16)], ids=["int8", "int4"])
@pytest.mark.parametrize("who", ["tiles", "wide-tiles"])
def test_quantized_experts_are_multiplied_as_what_they_stand_for(who: Who, form: MatrixFormat) -> None:
    weights, x, routes = mixture(6, 48, 32, "float32"), numbers((21, 48), "float32"), random_routes(21, 6, 2)
    names = ("gate", "up", "down")
    quantized: dict[str, Any] = {name: quantize(getattr(weights, name), form, axis=-2) for name in names}
    stands_for: dict[str, Any] = {name: dequantize(matrix) for name, matrix in quantized.items()}
    want = expected(x, routes, dataclasses.replace(weights, **stands_for), SILU)
    got = run(who, x, routes, dataclasses.replace(weights, **quantized))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


FORMS = {
    "int8": MatrixFormat("int8"),
    "int8 rows": MatrixFormat("int8", activations="int8"),
    "int8 fractions": MatrixFormat("int8", 16, has_zeros=True, has_whole_zeros=False),
    "int4 zeros": MatrixFormat("int4", 32, has_zeros=True),
    "mxfp4": MatrixFormat("mxfp4", 32),
    "fp8": MatrixFormat("fp8", 32),
}


def quantized(weights: ExpertWeights, forms: tuple[str, str, str]) -> ExpertWeights:
    """The weights with gates, ups and downs of these formats."""
    names = ("gate", "up", "down")
    matrices: dict[str, Any] = {
        name: quantize(getattr(weights, name), FORMS[form], axis=-2) for name, form in zip(names, forms, strict=True)
    }
    return dataclasses.replace(weights, **matrices)


def with_spans(weights: ExpertWeights, x: np.ndarray, routes: Routes) -> np.ndarray:
    """What experts of the gate SILU make of rows that are rounded to int8 before each matrix, one by one."""
    kernels = {name: getattr(weights, name) for name in ("gate", "up", "down")}
    arrays = {name: np.asarray(dequantize(kernel, np.dtype("float32")), np.float64) for name, kernel in kernels.items()}
    groups = {name: kernel.group_size for name, kernel in kernels.items()}
    y = np.zeros(x.shape)
    for row, ids in enumerate(np.asarray(routes.ids_tk)):
        for place, expert in enumerate(ids):
            given = {name: rounded_by_spans(x[[row]], groups[name])[0] for name in ("gate", "up")}
            gate, up = (given[name] @ arrays[name][expert] for name in ("gate", "up"))
            inner = (gate / (1 + np.exp(-gate)) * up).astype(np.float32).astype(x.dtype)
            own = rounded_by_spans(inner[None], groups["down"])[0]
            y[row] += np.float64(routes.weights_tk[row, place]) * (own @ arrays["down"][expert])
    return y


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.thinned(5)
@pytest.mark.long
def test_quantized_experts_may_be_packed(form: str, dtype: str) -> None:
    weights = quantized(mixture(6, 96, 64, dtype), (form, form, form))
    x, routes = numbers((21, 96), dtype), random_routes(21, 6, 2, 20)
    want = run("tiles", x, routes, weights)
    got = run("cpu", x, routes, weights)
    atol = {"float32": 2e-5, "bfloat16": 2e-2}[dtype] * (50 if form == "int8 rows" else 1)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)
    assert not got[20].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "forms",
    [("int8", "int8", "int4 zeros"), ("mxfp4",) * 3, ("int8 fractions", "int4 zeros", "int8")],
    ids=", ".join,
)
def test_rows_of_experts_are_rounded_by_spans(forms: tuple[str, str, str], dtype: str) -> None:
    """As before dense matrices, and each row of the gates and ups before the downs by itself."""
    weights = quantized(mixture(5, 96, 64, dtype, has_biases=False), forms)
    x, routes = numbers((130, 96), dtype), random_routes(130, 5, 2)
    got = np.asarray(sum_experts(jnp.asarray(x), routes, packed(weights, rounds_rows=True), SILU))
    want = with_spans(weights, x, routes)
    # A number between two integers may be rounded to the other one, or to the other number of bfloat16.
    assert np.sqrt(np.square(got - want).mean() / np.square(want).mean()) < {"float32": 1e-3, "bfloat16": 4e-3}[dtype]
    exact = run("cpu", x, routes, weights)
    assert 2e-3 < np.sqrt(np.square(got - exact).mean() / np.square(exact).mean()) < 3e-2


@pytest.mark.parametrize("rounds_rows", [False, True])
@pytest.mark.parametrize("form", ["int8", "int4 zeros", "mxfp4", "fp8"])
@pytest.mark.thinned(3)
def test_a_row_of_quantized_experts_has_the_same_bits_among_others(form: str, rounds_rows: bool) -> None:
    weights = packed(quantized(mixture(4, 64, 96, "float32"), (form,) * 3), rounds_rows=rounds_rows)
    x, routes = jnp.asarray(numbers((220, 64), "float32")), random_routes(220, 4, 2)

    def rows(part: slice) -> np.ndarray:
        chosen = Routes(routes.ids_tk[part], routes.weights_tk[part])
        return np.asarray(sum_experts(x[part], chosen, weights, SILU))

    every = rows(slice(None))
    for count in (1, 2, 7, 40):
        assert rows(slice(count)).tobytes() == every[:count].tobytes(), count
        assert rows(slice(-count, None)).tobytes() == every[-count:].tobytes(), count


def test_experts_with_steps_or_listed_groups_are_not_packed() -> None:
    matrices = quantize(numbers((3, 64, 8), "float32"), FORMS["int4 zeros"], axis=-2)
    assert can_pack_experts(matrices)
    listed = jnp.zeros((3, 64), jnp.int32)
    assert not can_pack_experts(dataclasses.replace(matrices, group_ids=listed))
    with_step = dataclasses.replace(matrices, activations="int8", input_scale=jnp.ones((3,)))
    assert not can_pack_experts(with_step)
    assert not can_pack_experts(quantize(numbers((3, 12, 8), "float32"), MatrixFormat("int4", 4), axis=-2))


def test_quantized_operands_that_contradict_each_other_are_refused() -> None:
    weights = packed(quantized(mixture(4, 64, 96, "float32"), ("int4 zeros",) * 3))
    routes, gate = random_routes(3, 4, 2), weights.gate
    with pytest.raises(jax.errors.JaxRuntimeError, match="rows and matrices differ in depth"):
        sum_experts(jnp.ones((3, 72)), routes, weights, SILU)
    fewer = dataclasses.replace(gate.scales, scales=gate.scales.scales[:-1])
    with pytest.raises(jax.errors.JaxRuntimeError, match="the scales do not fit the matrices"):
        sum_experts(
            jnp.ones((3, 64)), routes, dataclasses.replace(weights, gate=dataclasses.replace(gate, scales=fewer)), SILU
        )


def test_operands_that_contradict_each_other_are_refused() -> None:
    weights, routes = packed(mixture(4, 40, 50, "float32")), random_routes(3, 4, 2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="rows and matrices differ in depth"):
        apply_experts(jnp.ones((3, 39)), routes, weights, SILU)
    with pytest.raises(jax.errors.JaxRuntimeError, match="rows and matrices differ in type"):
        apply_experts(jnp.ones((3, 40), jnp.bfloat16), routes, weights, SILU)
    with pytest.raises(jax.errors.JaxRuntimeError, match="rows and routes differ in number"):
        apply_experts(jnp.ones((4, 40)), routes, weights, SILU)


def _arrays(tree: Any) -> list[jax.Array]:
    return jax.tree.leaves(tree)
