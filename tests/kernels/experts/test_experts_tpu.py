"""The TPUs' kernel of experts in Pallas' interpreter: results against float64, its lists of rows, and its sizes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.mesh import AbstractDevice
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh, AxisType

from jpaged.device.mesh import MESH_AXES
from jpaged.kernels.experts import ExpertWeights, Routes, StackedExperts, apply_experts, sum_experts, tpu
from jpaged.kernels.experts.tpu import _CONVERSIONS, _SCALED, ExpertRows, ExpertsForm, choose_form, find_form, pack
from jpaged.kernels.matmul import quantized
from jpaged.kernels.matmul.quantized import MatrixFormat, dequantize, quantize
from jpaged.kernels.matrix_format import NUM_BITS, VALUE_DTYPES
from jpaged.kernels.mixture_kind import SILU, GateFunction
from tests.conftest import QUICK_XLA_OPTIONS
from tests.kernels.experts.mixtures import CLAMPED, expected, mixture, numbers, random_routes

SHAPE = 6, 320, 192, 3
"""Experts, width, inner width, experts of a row: neither width is whole lines of 128."""
V6E, TPU7X = "TPU v6 lite", "TPU7x"
EARLY = pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True, vector_clock_size=256)


def run(
    x: np.ndarray, routes: Routes, weights: ExpertWeights, gate: GateFunction, params: Any = None, **sizes: Any
) -> np.ndarray:
    """The kernel's result, with the sizes that it would have on a v6e except for these."""

    def kernel(x_te: jax.Array, routes: Routes, weights: ExpertWeights, gate: GateFunction) -> jax.Array:
        with on("tpu"):
            form = find_form(x_te, routes, weights, gate)
        assert form is not None
        form = dataclasses.replace(form, is_interpreted=params or pltpu.InterpretParams(), **sizes)
        return tpu.apply(x_te, routes, weights, form)

    called = functools.partial(apply_experts, gate=gate, kernel=kernel)
    return np.asarray(jax.jit(called, compiler_options=QUICK_XLA_OPTIONS)(jnp.asarray(x), routes, weights))


def check(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-2 * np.abs(want).max())


@pytest.mark.long
@pytest.mark.parametrize("gate", [SILU, CLAMPED, GateFunction("gelu_tanh"), GateFunction("relu2")], ids=str)
@pytest.mark.parametrize("block", [192, 128], ids=["whole", "beyond the end"])
def test_rows_become_what_float64_makes_of_them(gate: GateFunction, block: int) -> None:
    num_experts, width, inner, top_k = SHAPE
    weights = mixture(num_experts, width, inner, "bfloat16")
    if not gate.has_gates:
        weights = dataclasses.replace(weights, gate=weights.up, gate_bias=weights.up_bias)
    x, routes = numbers((37, width), "bfloat16"), random_routes(37, num_experts, top_k, num_in_use=35)
    got = run(x, routes, weights, gate, EARLY, block=block, tile_rows=16)
    check(got, expected(x, routes, weights, gate))
    assert not got[35:].any(), "rows that are sent nowhere are zeros"


@pytest.mark.long
@pytest.mark.parametrize("values", ["int8", "fp8"])
def test_weights_of_eight_bits_have_a_scale_per_column(values: Any) -> None:
    num_experts, width, inner, top_k = SHAPE
    plain = mixture(num_experts, width, inner, "bfloat16", has_biases=False)

    def rounded(matrices: Any) -> Any:
        return quantize(matrices, MatrixFormat(values), axis=-2)

    gate, up, down = (rounded(each) for each in (plain.gate, plain.up, plain.down))
    read = ExpertWeights(*(dequantize(each) for each in (gate, up, down)))
    x, routes = numbers((37, width), "bfloat16"), random_routes(37, num_experts, top_k)
    got = run(x, routes, ExpertWeights(gate, up, down), SILU, tile_rows=16, block=128)
    check(got, expected(x, routes, read, SILU))


GROUPS: list[dict[str, Any]] = [
    {"values": "mxfp4", "group_size": 32},
    {"values": "int4", "group_size": 64},
    {"values": "int4", "group_size": 32, "has_zeros": True},
    {"values": "fp8", "group_size": 64},
    {"values": "int8", "group_size": 16, "has_zeros": True},
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "block"), [(form, (256, 192)[i % 2]) for i, form in enumerate([*GROUPS, GROUPS[0]])], ids=str
)
def test_weights_of_groups_are_converted_once_for_all_rows_of_an_expert(form: dict[str, Any], block: int) -> None:
    """Some experts have rows of two tiles; the depth of gates and ups is a whole chunk and a part."""
    inner = 192 if block == 192 else 448
    plain = mixture(3, 320, inner, "bfloat16")
    names = "gate", "up", "down"
    coded: dict[str, Any] = {name: quantize(getattr(plain, name), MatrixFormat(**form), axis=-2) for name in names}
    read: Any = {name: dequantize(each) for name, each in coded.items()}
    x, routes = numbers((37, 320), "bfloat16"), random_routes(37, 3, 2)
    got = run(x, routes, dataclasses.replace(plain, **coded), CLAMPED, tile_rows=16, block=block)
    check(got, expected(x, routes, dataclasses.replace(plain, **read), CLAMPED))


@pytest.mark.parametrize("values", ["mxfp4", "fp8", "int4"])
def test_every_number_of_few_bits_is_converted_exactly(values: Any) -> None:
    """All codes; MXFP4's scales are powers of two, and 0 becomes 2**-33 of one."""
    num_bits = NUM_BITS[values]
    codes = np.arange(1 << num_bits, dtype=np.uint8).repeat(2048 >> num_bits)
    codes = codes[(codes & 0x7F) != 0x7F] if values == "fp8" else codes  # NaN
    codes = np.resize(codes, 2048)
    per_word = 32 // num_bits
    wide = (
        codes.reshape(-1, per_word, 128).astype(np.uint32) << (np.arange(per_word, dtype=np.uint32) * num_bits)[:, None]
    )
    words = jnp.asarray(np.bitwise_or.reduce(wide, axis=1).astype(np.int32))
    raw = codes.view(VALUE_DTYPES[values]) if num_bits == 8 else codes.astype(np.int8)
    want = (((raw ^ 8) - 8) if values == "int4" else raw).astype(np.float32).reshape(-1, per_word, 128)
    if values == "mxfp4":
        want = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[codes & 7] * np.where(codes & 8, -1, 1)
        want = want.reshape(-1, per_word, 128)
    for scale in (None, 0.25):
        given = (
            None if scale is None else jnp.full((2 * len(words), 128), scale * _SCALED.get(values, 1.0), jnp.bfloat16)
        )
        found = jax.jit(lambda *read, convert=_CONVERSIONS[values]: convert(*read, None))(words, given)
        for j, each in enumerate(found):
            pairs = np.asarray(each, np.float32).reshape(-1, 2, 128)
            np.testing.assert_allclose(pairs[:, 0], want[:, j] * (scale or 1), rtol=0, atol=2.0**-33)
            np.testing.assert_allclose(pairs[:, 1], want[:, j + per_word // 2] * (scale or 1), rtol=0, atol=2.0**-33)


@pytest.mark.long
def test_a_layer_is_read_in_the_array_of_all() -> None:
    num_experts, width, inner, top_k = SHAPE
    layers = [mixture(num_experts, width, inner, "bfloat16") for _ in range(2)]
    layers[0] = jax.tree.map(lambda array: array * 3, layers[0])
    x, routes = numbers((5, width), "bfloat16"), random_routes(5, num_experts, top_k)

    def stacked(*matrices: jax.Array) -> StackedExperts:
        return StackedExperts(jnp.stack(matrices), jnp.int32(1))

    own = layers[1]
    matrices: Any = {name: stacked(getattr(layers[0], name), getattr(own, name)) for name in ("gate", "up", "down")}
    weights = dataclasses.replace(own, **matrices)
    check(run(x, routes, weights, SILU), expected(x, routes, own, SILU))


@pytest.mark.long
def test_a_row_does_not_depend_on_others() -> None:
    """Bit for bit: one expert has all rows, in several tiles, or only its own."""
    num_experts, width, inner, _ = SHAPE
    weights = mixture(num_experts, width, inner, "bfloat16")
    x, alone = numbers((37, width), "bfloat16"), np.full((37, 2), num_experts, np.int32)
    alone[36] = 4, 1
    crowded = np.full((37, 2), 4, np.int32)
    crowded[:, 1] = np.arange(37) % 4
    crowded[36] = 4, 1
    factors = jnp.asarray(np.random.default_rng(0).uniform(0.1, 1, (37, 2)).astype(np.float32))
    one, all_rows = (run(x, Routes(jnp.asarray(ids), factors), weights, SILU, tile_rows=16) for ids in (alone, crowded))
    assert one[36].any() and not one[:36].any()
    np.testing.assert_array_equal(one[36], all_rows[36])


@pytest.mark.long
def test_a_step_may_have_no_row_for_any_expert() -> None:
    num_experts, width, inner, top_k = SHAPE
    weights = mixture(num_experts, width, inner, "bfloat16")
    x, routes = numbers((5, width), "bfloat16"), random_routes(5, num_experts, top_k, num_in_use=0)
    assert not run(x, routes, weights, SILU).any()


@pytest.mark.long
def test_rows_are_listed_by_expert() -> None:
    ids = np.asarray([[3, 1], [1, 5], [4, 3], [5, 5]], np.int32)  # 5 is nowhere
    factors = np.asarray([[0.5, 0.25], [1.0, 9.0], [2.0, 4.0], [9.0, 9.0]], np.float32)
    rows = ExpertRows.sort(Routes(jnp.asarray(ids), jnp.asarray(factors)), 5, 10)
    assert rows.num_used.tolist() == [3]
    assert rows.matrices_s[:3].tolist() == [11, 13, 14]
    assert (rows.starts_s[:3].tolist(), rows.counts_s[:3].tolist()) == ([0, 2, 4], [2, 2, 1])
    assert rows.tokens_p[:5].tolist() == [0, 1, 0, 2, 2]
    assert rows.weights_p[:5].tolist() == [0.25, 1.0, 0.5, 4.0, 2.0]
    assert len(rows.tokens_p) == len(rows.weights_p) == 8 + 8, "a group of rows may extend beyond the last"


@pytest.mark.long
def test_two_numbers_share_a_word() -> None:
    x = np.arange(320, dtype=np.float32)[None].astype(jnp.bfloat16)
    words = np.asarray(pack(jnp.asarray(x)))
    assert words.shape == (1, 2, 128)
    halves = words.reshape(-1).view(np.uint16).reshape(-1, 2)
    padded = np.pad(x[0], (0, 192))
    np.testing.assert_array_equal(halves[:, 0], padded[:256].view(np.uint16))
    np.testing.assert_array_equal(halves[:, 1], padded[256:].view(np.uint16))


@pytest.mark.parametrize(
    ("kind", "shape", "num_experts", "tile_rows", "block"),
    [
        (V6E, (64, 2048, 768, 8), 128, 64, 768),
        (V6E, (2048, 2048, 768, 8), 128, 160, 768),
        (TPU7X, (2048, 2048, 768, 8), 128, 160, 768),
        (V6E, (2048, 2880, 2880, 4), 16, 256, 1024),
        (TPU7X, (8, 7168, 2048, 8), 256, 16, 512),
        (TPU7X, (64, 7168, 2048, 8), 256, 64, 384),
    ],
    ids=str,
)
def test_blocks_fit_the_vector_memory(
    kind: str, shape: tuple[int, int, int, int], num_experts: int, tile_rows: int, block: int
) -> None:
    form = choose_form(shape, num_experts, SILU, kind)
    assert form is not None
    assert (form.tile_rows, form.block) == (tile_rows, block)
    windows = 2 * 2 * 3 * shape[1] * block
    assert windows + 6 * shape[0] * shape[1] < form.vmem_bytes < (128 if kind == V6E else 64) << 20
    assert form.num_blocks * block - shape[2] < 128 * form.num_blocks


def test_what_does_not_fit_is_multiplied_by_xla() -> None:
    assert choose_form((8192, 2048, 768, 8), 128, SILU, TPU7X) is None, "states and sums are larger than the memory"
    assert choose_form((2500, 2048, 768, 8), 128, SILU, TPU7X) is None, "rows would be gathered again and again"
    assert choose_form((2048, 4096, 14336, 2), 8, SILU, V6E) is None
    assert choose_form((16384, 256, 256, 8), 128, SILU, V6E) is None, "the list of rows is larger than scalar memory"
    assert isinstance(choose_form((4096, 2048, 768, 8), 128, SILU, V6E), ExpertsForm)


def on(platform: str, kind: str = V6E) -> Any:
    sizes = (1,) * len(MESH_AXES)
    mesh = AbstractMesh(
        sizes,
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
        abstract_device=AbstractDevice(kind, 1, platform),
    )
    return jax.sharding.use_abstract_mesh(mesh)


def test_it_runs_on_tpus_with_weights_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def shapes(dtype: str, width: int = 64, inner: int = 96, **quantization: Any) -> tuple[Any, ...]:
        of_type: list[Any] = [
            jax.ShapeDtypeStruct((4, *shape), dtype) for shape in ((width, inner), (width, inner), (inner, width))
        ]
        if quantization:
            form = MatrixFormat(**quantization)
            of_type = [quantized.abstract_matrix(form, each.shape, -2, np.dtype(dtype)) for each in of_type]
        of_routes: Any = (jax.ShapeDtypeStruct((8, 2), "int32"), jax.ShapeDtypeStruct((8, 2), "float32"))
        return jax.ShapeDtypeStruct((8, width), dtype), Routes(*of_routes), ExpertWeights(*of_type), SILU

    for kind in ("cpu", "gpu"):
        with on(kind):
            assert find_form(*shapes("bfloat16")) is None
    with on("tpu"):
        taken = shapes("bfloat16"), shapes("bfloat16", values="int8"), shapes("bfloat16", values="fp8")
        assert all(find_form(*each) is not None for each in taken)
        assert find_form(*shapes("bfloat16", values="fp8", activations="fp8")) is not None, "rows stay as they are"
        for form in GROUPS:
            assert find_form(*shapes("bfloat16", 64, 64, **form)) is not None
        others: list[dict[str, Any]] = [
            {"values": "int8", "group_size": 32, "has_group_ids": True},
            {"values": "int4", "group_size": 32, "has_zeros": True, "has_whole_zeros": False},
            {"values": "int8", "has_zeros": True},
            {"values": "mxfp4", "group_size": 32},  # 96 rows of downs are not whole words of registers
            {"values": "int8", "activations": "int8"},
        ]
        assert all(find_form(*shapes("bfloat16", **each)) is None for each in others)
        assert find_form(*shapes("float32")) is None
        assert find_form(*shapes("bfloat16", width=40)) is None, "the depth is not whole registers"
        called: list[Any] = []

        def apply(x_te: Any, *others: Any) -> Any:
            called.append(others)
            return x_te

        monkeypatch.setattr(tpu, "apply", apply)
        jax.eval_shape(functools.partial(sum_experts, gate=SILU, backend="ragged"), *taken[0][:3])
        assert len(called) == 1
    with on("tpu", TPU7X):
        assert find_form(*shapes("bfloat16", values="fp8", activations="fp8")) is None, "rows are rounded there"
