"""The kernels of Hopper and of other GPUs are lowered for CUDA, with the plain wheels of jax and without a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

# How an abstract mesh says which device it is of has no public name yet.
from jax._src.mesh import AbstractDevice
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, AxisType

from benchmarks.aot_gpu.cases import ATTENTION, CASES, CUDA, TRITON, AttentionCase
from benchmarks.aot_gpu.compile_case import host_waits
from jpaged.device.aot.topology import GPUS
from jpaged.device.mesh import MESH_AXES, _by_columns, build_mesh, replicated
from jpaged.device.sharded_matmul import _matrix_specs
from jpaged.errors import Unsupported
from jpaged.kernels.cuda_library import TARGET
from jpaged.kernels.matmul.on_device import PartedMatrix, multiply_on_device
from jpaged.kernels.matmul.quantized import abstract_matrix, component_axes
from jpaged.kernels.matmul.triton.grouped import multiply_sorted
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.kernels.recurrence import Recurrence, RecurrenceKernel, RecurrentRows, update_rows

KINDS = {
    "a100": "NVIDIA A100-SXM4-80GB",
    "l4": "NVIDIA L4",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
}

TRITON_CALL = "__gpu$xla.gpu.triton"
QUICK = (
    AttentionCase(),
    AttentionCase(num_tokens=8, num_rows=8, kv_dtype="int8"),
    AttentionCase(8, 4, 256, block_size=48, num_tokens=512, dtype="float16", sliding_window=100, soft_cap=50.0),
    AttentionCase(14, 2, 64, kv_dtype="float8_e4m3fn", num_tokens=512),
    AttentionCase(gpu="a100", backend="pallas-triton"),
    AttentionCase(gpu="h100", backend="pallas-triton"),
    AttentionCase(71, 1, 80, block_size=1, num_tokens=512, sliding_window=1000, gpu="l4", backend="pallas-triton"),
    AttentionCase(kv_dtype="float8_e4m3fn", gpu="b200", backend="pallas-triton"),
    AttentionCase(is_cascade=True, sliding_window=1024, gpu="a100", backend="pallas-triton"),
    AttentionCase(16, 1, 576, value_dim=512, gpu="a100", backend="pallas-triton"),
    AttentionCase(128, 1, 576, value_dim=512, num_tokens=512, kv_dtype="int8", gpu="h200", backend="pallas-triton"),
    AttentionCase(gpu="a100", backend="cuda"),
    AttentionCase(kv_dtype="int8", num_tokens=512, is_cascade=True, gpu="l4", backend="cuda"),
)
WHOLE = (*ATTENTION, *(case for case in (*TRITON, *CUDA) if case.gpu in KINDS))


def lower(case: AttentionCase) -> str:
    device = AbstractDevice(KINDS[case.gpu], 100, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("model",), abstract_device=device)):
        jitted = jax.jit(case.call, donate_argnums=0)
        # Triton's code is no promise from one jax to the next; it is compiled where it was made.
        checks = [export.DisabledSafetyCheck.custom_call(call) for call in (TRITON_CALL, TARGET)]
        return export.export(jitted, platforms=["cuda"], disabled_checks=checks)(*case.arguments()).mlir_module()


def check(case: AttentionCase) -> None:
    text = lower(case)
    if case.backend == "pallas-triton":
        assert text.count(f"custom_call @{TRITON_CALL}(") == (2 if case.triton_cut().merged_rows else 1)
        assert "num_stages = 2" in text
        return
    if case.backend == "cuda":
        assert text.count(f"custom_call @{TARGET}(") == case.num_lists
        assert TRITON_CALL not in text
        return
    assert text.count("custom_call @mosaic_gpu_v2(") == 1
    # Its code is in the call as text: products of the tensor core, and copies that signal barriers.
    assert "wgmma" in text
    assert "cp.async.bulk" in text or "mbarrier" in text


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
@pytest.mark.thinned(6)
def test_the_kernel_is_lowered(case: AttentionCase) -> None:
    check(case)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.deep if i % 4 else pytest.mark.long) for i, case in enumerate(WHOLE)],
    ids=lambda case: case.name,
)
def test_the_whole_matrix_is_lowered(case: AttentionCase) -> None:
    check(case)


def test_a_quarter_of_the_matrix_has_every_gpu_and_type() -> None:
    for kind in (
        lambda case: (case.backend, case.gpu),
        lambda case: (case.backend, case.kv_dtype),
        lambda case: (case.backend, case.is_cascade),
    ):
        assert {kind(case) for case in (*QUICK, *WHOLE[::4])} == {kind(case) for case in WHOLE}


def test_more_than_shared_memory_holds_is_refused_before_lowering() -> None:
    with pytest.raises(Unsupported, match="the limit is 232448"):
        lower(AttentionCase(head_dim=256, block_size=128))


def test_every_case_is_for_a_gpu_that_is_described() -> None:
    assert {case.gpu for case in CASES} == set(GPUS)
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


FORMS = {
    "int4": MatrixFormat("int4", 128, has_zeros=True),
    "mxfp4": MatrixFormat("mxfp4", 32),
    "fp8": MatrixFormat("fp8", 128, activations="fp8-groups"),
}


def lowered_product(name: str, gpu: str, dtype: str) -> str:
    matrices = abstract_matrix(FORMS[name], (8, 256, 512), -2, np.dtype(jnp.dtype(dtype)))
    rows = jax.ShapeDtypeStruct((128, 256), np.dtype(jnp.dtype(dtype)))
    counts, owners = (jax.ShapeDtypeStruct((size,), np.dtype(np.int32)) for size in (8, 128))
    device = AbstractDevice(KINDS[gpu], 100, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("model",), abstract_device=device)):
        checks = [export.DisabledSafetyCheck.custom_call(TRITON_CALL)]
        lowered = export.export(jax.jit(multiply_sorted), platforms=["cuda"], disabled_checks=checks)
        return lowered(rows, counts, owners, matrices).mlir_module()


@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize("name", FORMS)
def test_the_product_of_groups_of_rows_is_lowered(name: str, gpu: str) -> None:
    text = lowered_product(name, gpu, "bfloat16")
    assert text.count(f"custom_call @{TRITON_CALL}(") == 1
    assert "grouped_product" in text


@pytest.mark.long
@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize("name", FORMS)
def test_the_product_of_groups_of_float16_rows_is_lowered(name: str, gpu: str) -> None:
    text = lowered_product(name, gpu, "float16")
    assert text.count(f"custom_call @{TRITON_CALL}(") == 1
    assert "bf16" not in text


@pytest.mark.long
def test_more_numbers_than_31_bits_count_are_lowered_in_pairs() -> None:
    """The experts of a layer of DeepSeek-V3 on one GPU."""
    matrices = abstract_matrix(FORMS["fp8"], (256, 7168, 2048), -2, np.dtype(jnp.bfloat16))
    rows = jax.ShapeDtypeStruct((512, 7168), np.dtype(jnp.bfloat16))
    counts, owners = (jax.ShapeDtypeStruct((size,), np.dtype(np.int32)) for size in (256, 512))
    device = AbstractDevice(KINDS["h200"], 132, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("model",), abstract_device=device)):
        checks = [export.DisabledSafetyCheck.custom_call(TRITON_CALL)]
        lowered = export.export(jax.jit(multiply_sorted), platforms=["cuda"], disabled_checks=checks)
        text = lowered(rows, counts, owners, matrices).mlir_module()
    (call,) = (line for line in text.splitlines() if f"custom_call @{TRITON_CALL}(" in line)
    assert "tensor<256x7168x1024xi16>" in call


@pytest.mark.parametrize("split", ["depth", "columns"])
@pytest.mark.parametrize("name", FORMS)
def test_a_product_over_two_devices_is_lowered_as_the_kernel(name: str, split: str) -> None:
    matrix = abstract_matrix(FORMS[name], (512, 2, 512), -3, np.dtype(jnp.bfloat16))
    axes = ("heads", None, None) if split == "depth" else (None, None, "heads")
    specs = _matrix_specs(component_axes(axes, -3, FORMS[name], matrix.dtype))
    assert specs is not None
    device, types = AbstractDevice(KINDS["h200"], 132, "gpu"), (AxisType.Auto,) * len(MESH_AXES)
    mesh = AbstractMesh((1, 1, 2), MESH_AXES, types, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        checks = [export.DisabledSafetyCheck.custom_call(TRITON_CALL)]
        lowered = export.export(jax.jit(multiply_on_device), platforms=["cuda"], disabled_checks=checks)
        rows = jax.ShapeDtypeStruct((64, 512), np.dtype(jnp.bfloat16))
        text = lowered(rows, PartedMatrix(matrix, specs, mesh)).mlir_module()
    assert text.count(f"custom_call @{TRITON_CALL}(") == 1
    assert ("all_reduce" in text) is (split == "depth")


def test_numbers_of_8_bits_lie_by_columns() -> None:
    mesh = build_mesh(jax.devices()[:1])
    whole = replicated(mesh)

    def order(name: str, shape: tuple[int, ...], axis: int) -> object:
        matrix = abstract_matrix(FORMS[name], shape, axis, np.dtype(jnp.bfloat16))
        placed = _by_columns(matrix, jax.tree.map(lambda _: whole, matrix))
        assert placed.scales == whole
        layout = placed.values.layout if isinstance(placed.values, Format) else None
        return layout.major_to_minor if isinstance(layout, Layout) else None

    assert order("fp8", (256, 2, 512), -3) == (1, 2, 0)
    assert order("fp8", (8, 256, 512), -2) == (0, 2, 1)
    assert order("int4", (256, 512), -2) is None


@pytest.mark.parametrize("is_delta", [pytest.param(True, marks=pytest.mark.long), False], ids=["delta", "mamba"])
def test_recurrences_are_lowered_and_the_host_waits_for_none_of_their_loops(is_delta: bool) -> None:
    """Loops of programs for CPUs have the same turns as those for GPUs, which XLA does not compile here."""
    shapes = {"q": (128, 2, 16), "k": (128, 2, 16), "x": (128, 4, 8), "log_decays": (128, 4)}
    shapes |= {"strengths": (128, 4)} if is_delta else {}
    inputs: list[Any] = [jax.ShapeDtypeStruct(shape, np.dtype(np.float32)) for shape in shapes.values()]
    one = Recurrence(*inputs)
    states = jax.ShapeDtypeStruct((3, 4, 16, 8), np.dtype(np.float32))
    starts, of_rows = (jax.ShapeDtypeStruct((size,), np.dtype(np.int32)) for size in (4, 3))

    def jitted(*, has_static_loops: bool) -> jax.stages.Wrapped:
        kernel = RecurrenceKernel("blocks", has_static_loops)

        def run(
            one: Recurrence, states: jax.Array, starts_s1: jax.Array, slots_s: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            rows = RecurrentRows.of(starts_s1, slots_s < 0, slots_s, slots_s, 128, kernel)
            return update_rows(one, states, rows)

        return jax.jit(run, donate_argnums=1)

    arguments = one, states, starts, of_rows
    text = export.export(jitted(has_static_loops=True), platforms=["cuda"])(*arguments).mlir_module()
    assert "custom_call" not in text
    static, other = (jitted(has_static_loops=is_static).lower(*arguments).compile() for is_static in (True, False))
    assert host_waits(str(static.as_text())) == []
    assert host_waits(str(other.as_text())) != []
