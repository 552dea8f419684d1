"""Counts the kernel of experts: a layer's experts in one call, beside the memory's cycles and the matrix units'.

    make aot && python -m benchmarks.tpu_cycles --experts [--only PART_OF_A_CASE] [--record]

Rows choose experts evenly at random. The rest of a layer (lists of rows, layouts) is what libtpu notes on it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import tpu_step
from benchmarks.tpu_cycles.cases import TOPOLOGIES, flops_per_cycle, memory
from benchmarks.tpu_cycles.machine import LostTrack, Machine
from benchmarks.tpu_cycles.operands import kernel_calls
from benchmarks.tpu_cycles.program import read
from jpaged.device.aot.topology import compile_only_devices, find_topology
from jpaged.errors import InvalidArgument
from jpaged.kernels.experts import ExpertWeights, Routes, sum_experts
from jpaged.kernels.matmul.quantized import abstract_matrix
from jpaged.kernels.matrix_format import NUM_BITS, MatrixFormat
from jpaged.kernels.mixture_kind import SILU

KIND = "experts"
_WRITTEN = "v6e/experts/32of128x8x2048x768/bfloat16/64"
_SHAPE = re.compile(r"(\d+)of(\d+)x(\d+)x(\d+)x(\d+)")
_FORMS: Mapping[str, MatrixFormat | None] = {
    "bfloat16": None,
    "int8": MatrixFormat("int8"),
    "fp8": MatrixFormat("fp8"),
    "fp8-128": MatrixFormat("fp8", 128),
    "int4-128": MatrixFormat("int4", 128),
    "mxfp4": MatrixFormat("mxfp4", 32),
}
"""Formats of weights by name: 8 bits with a scale per column, or groups with a scale in float32."""


@dataclass(frozen=True, slots=True)
class ExpertsCase:
    """The experts of one layer on one device.

    Attributes:
        generation: of the TPU, as `TOPOLOGIES` has them.
        num_own: experts that the device has.
        num_experts: experts that rows choose from.
        top_k: that a row chooses.
        width, inner: of states, and of gates and ups.
        dtype: of the weights, as `_FORMS` has them.
        num_tokens: rows of the step.
    """

    generation: str
    num_own: int
    num_experts: int
    top_k: int
    width: int
    inner: int
    dtype: str
    num_tokens: int

    def __str__(self) -> str:
        shape = f"{self.num_own}of{self.num_experts}x{self.top_k}x{self.width}x{self.inner}"
        return f"{self.generation}/{KIND}/{shape}/{self.dtype}/{self.num_tokens}"

    @classmethod
    def parse(cls, text: str) -> ExpertsCase:
        """The case that `str` writes so.

        Raises:
            InvalidArgument: it is not written so.
        """
        generation, _, rest = text.partition(f"/{KIND}/")
        shape, *others = rest.split("/")
        found = _SHAPE.fullmatch(shape)
        if generation not in TOPOLOGIES or not found or len(others) != 2 or others[0] not in _FORMS:
            raise InvalidArgument("case", f"{text!r} is not like {_WRITTEN}")
        own, num, top_k, width, inner = (int(number) for number in found.groups())
        return cls(generation, own, num, top_k, width, inner, others[0], int(others[1]))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices of an expert, and of the scales of groups."""
        return 2 * self.bytes_of(self.width) * self.inner + self.bytes_of(self.inner) * self.width

    def bytes_of(self, depth: int, *, has_scales: bool = True) -> int:
        """Bytes of a column."""
        form = _FORMS[self.dtype]
        if form is None:
            return 2 * depth
        of_scales = 4 * form.num_groups(depth) if form.group_size and has_scales else 0
        return depth * NUM_BITS[form.values] // 8 + of_scales


def gate() -> Iterator[ExpertsCase]:
    """The cases that a test holds: Qwen3-30B-A3B, on one device or one of four, and gpt-oss-20b in MXFP4."""
    whole, part = (128, 128, 8, 2048, 768), (32, 128, 8, 2048, 768)
    yield ExpertsCase("v6e", *whole, "bfloat16", 64)  # the first two are compiled soonest
    yield ExpertsCase("v6e", *whole, "int8", 64)
    yield ExpertsCase("v6e", *part, "bfloat16", 64)
    for generation in ("v6e", "tpu7x"):
        yield ExpertsCase(generation, *whole, "bfloat16", 2048)
    yield ExpertsCase("v6e", *part, "bfloat16", 2048)
    for dtype in ("fp8", "int4-128"):
        yield ExpertsCase("v6e", *whole, dtype, 64)
    yield ExpertsCase("v6e", 32, 32, 4, 2880, 2880, "mxfp4", 64)


def few() -> list[ExpertsCase]:
    """A part of the gate."""
    return [*gate()][:2]


def count(case: ExpertsCase, folder: Path) -> dict[str, Any]:
    """The cycles of a case, compiled now; the folder is empty before and behind.

    Raises:
        UnreadableProgram: libtpu wrote what is not understood.
        LostTrack: the program cannot be followed, or reads other experts than the rows'.
    """
    mesh = Mesh(np.array(compile_only_devices(find_topology(TOPOLOGIES[case.generation]))[:1]), ("x",))
    whole = PartitionSpec()
    given = NamedSharding(mesh, whole)

    def layer(x: Any, ids: Any, factors: Any, gates: Any, ups: Any, down: Any) -> Any:
        return sum_experts(x, Routes(ids, factors), ExpertWeights(gates, ups, down), SILU, backend="ragged")

    sharded = jax.shard_map(layer, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    avals = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=Format(Layout(tuple(range(a.ndim))), given)),
        _shapes(case),
    )
    text = jax.jit(sharded).lower(*avals).compile().as_text() or ""
    program = read(folder, KIND)
    for path in folder.iterdir():
        path.unlink()
    ids = _routes(case)
    (call,) = kernel_calls(sharded, avals)(_arguments(avals, ids))
    num_rows = int((ids < case.num_own).sum())
    num_used = len(np.unique(ids[ids < case.num_own]))
    weights = [i for i, shape in enumerate(call.shapes) if shape == (case.num_own, case.width, case.inner)]
    run = Machine(program, call.operands, weights[0], memory(case.generation)).run()
    columns = -(-case.inner // 128) * 128  # in whole tiles
    if run.pool_bytes != num_used * case.bytes_of(case.width, has_scales=False) * columns:
        raise LostTrack(f"{case}: read {run.pool_bytes} bytes of gates; {num_used} experts have rows")
    memory_cycles = num_used * case.weight_bytes / memory(case.generation).bytes_per_cycle
    product_cycles = 6 * num_rows * case.width * case.inner / flops_per_cycle(case.generation)
    return {
        "case": str(case),
        **dataclasses.asdict(case),
        "num_used": num_used,
        "num_rows": num_rows,
        "memory_cycles": round(memory_cycles),
        "product_cycles": round(product_cycles),
        "kernel_cycles": round(run.num_cycles),
        "rest_cycles": _rest(text),
        "num_fills": program.num_fills,
        "num_spills": program.num_spills,
    }


def _rest(text: str) -> int:
    """What libtpu notes on all operations but the kernel."""
    return sum(one.cycles for one in tpu_step.entry_operations(text) if not one.name.startswith(KIND))


def _shapes(case: ExpertsCase) -> tuple[Any, ...]:
    def matrices(*shape: int) -> Any:
        shape = (case.num_own, *shape)
        form = _FORMS[case.dtype]
        if form is None:
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        return abstract_matrix(form, shape, -2, np.dtype(jnp.bfloat16))

    routes = case.num_tokens, case.top_k
    return (
        jax.ShapeDtypeStruct((case.num_tokens, case.width), jnp.bfloat16),
        jax.ShapeDtypeStruct(routes, jnp.int32),
        jax.ShapeDtypeStruct(routes, jnp.float32),
        matrices(case.width, case.inner),
        matrices(case.width, case.inner),
        matrices(case.inner, case.width),
    )


def _routes(case: ExpertsCase) -> np.ndarray:
    chances = np.random.default_rng(0).random((case.num_tokens, case.num_experts))
    return np.minimum(np.argsort(chances, axis=1)[:, : case.top_k], case.num_own).astype(np.int32)


def _arguments(avals: Sequence[Any], ids: np.ndarray) -> list[Any]:
    """Routes, and views of one zero in place of all else, which decides nothing."""
    empty = [jax.tree.map(lambda a: np.broadcast_to(np.zeros((), a.dtype), a.shape), aval) for aval in avals]
    return [empty[0], ids, *empty[2:]]


def experts_table(numbers: Mapping[str, Mapping[str, Any]]) -> str:
    """The record as docs/performance.md has it."""
    lines = ["| case | memory | products | kernel | of the larger | rest of the layer | spills |", "|---" * 7 + "|"]
    for case, one in sorted(numbers.items()):
        bound = max(one["memory_cycles"], one["product_cycles"])
        keys = ("memory_cycles", "product_cycles", "kernel_cycles")
        cells = [*(f"{one[key]:,}" for key in keys), f"{one['kernel_cycles'] / bound:.2f}"]
        cells += [f"{one['rest_cycles']:,}", f"{one['num_spills']:,}"]
        lines.append(f"| {case.replace(f'/{KIND}/', ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines)
