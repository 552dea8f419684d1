"""Where the cycles of a model step on TPUs go besides its products, by what libtpu itself estimates.

    make aot && python -m benchmarks.tpu_step [--topology v6e:1x1] [--tokens 64 2048] [--operations] [--save]

One `forward[T]` of Llama-3.1-8B's widths is compiled for a TPU that is not here, and the body of the loop over its
layers is read: libtpu notes on every fusion how many cycles it expects it to take. What has no note (a gather, a kernel
that is not attention) is counted as its bytes at the memory's rate, on top of what libtpu notes on the smallest fusion.
Attention kernels are left out, whose work no program tells (`benchmarks.tpu_cycles` counts them): the shares are of
all the rest, and so too large rather than too small.

    products     matrix products, with whatever is fused into them
    norms        sums of squares, roots, and scales
    glue         the rest: rotation, keys and values as the pool keeps them, layouts of queries and outputs, lists
    exchange     what devices send each other
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benchmarks.record import save
from benchmarks.tpu_programs import run
from jpaged.config import EngineConfig
from jpaged.device.aot.deployment import Instruction, parse_computations
from jpaged.device.aot.topology import compile_only_devices, find_topology
from jpaged.device.compilation.lowering import abstract_serving, program_lowerings
from jpaged.device.mesh import build_mesh
from jpaged.models.model import Model
from jpaged.plan.known_models import KNOWN_MODELS

Kind = Literal["products", "attention", "norms", "glue", "exchange"]

SMALLEST_FUSION = 2116
"""Cycles that libtpu 0.0.42 notes on a fusion of next to no elements."""
BYTES_PER_CYCLE = 765
"""The memory's rate by libtpu's own notes on products of few rows with large weights (v6e)."""
NUM_LAYERS = 4
_OPTIONS = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "block_size": 32, "max_model_len": 4096}
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier", "partition-id"}
_EXCHANGES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
_PRODUCTS = {"dot", "convolution"}
_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_MARK = "STEP "


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that a layer runs.

    Attributes:
        kind: see the module.
        name: in the program's text.
        result: its type.
        where: the operation of the model that it stands for, as jax names it.
        cycles: that it takes; 0 for an attention kernel.
        is_copied: it is an asynchronous copy, whose cycles are hidden behind others.
    """

    kind: Kind
    name: str
    result: str
    where: str
    cycles: int
    is_copied: bool = False


@dataclass(frozen=True, slots=True)
class StepCycles:
    """What one layer of a step runs."""

    topology: str
    num_tokens: int
    operations: tuple[Operation, ...]

    def cycles(self, kind: Kind) -> int:
        """All cycles of a kind."""
        return sum(operation.cycles for operation in self.operations if operation.kind == kind)

    @property
    def total(self) -> int:
        """The cycles of a layer without its attention kernels."""
        return sum(operation.cycles for operation in self.operations)

    @property
    def glue_share(self) -> float:
        """The part of the cycles that is glue."""
        return self.cycles("glue") / self.total

    @property
    def num_small(self) -> int:
        """Operations of glue that are not asynchronous copies."""
        return sum(operation.kind == "glue" and not operation.is_copied for operation in self.operations)

    @property
    def num_copies(self) -> int:
        """Asynchronous copies."""
        return sum(operation.is_copied for operation in self.operations)


def layer_operations(text: str) -> list[Operation]:
    """What the body of a program's loop over layers runs; of a condition, its cheapest branch.

    Raises:
        ValueError: the program has no loop.
    """
    computations = parse_computations(text)
    loops = [found for body in computations.values() for found in body if found.opcode == "while"]
    if not loops:
        raise ValueError("the program has no loop over layers")
    bodies = [_operations(_called(loop, "body"), computations) for loop in loops]
    return max(bodies, key=lambda operations: sum(operation.cycles for operation in operations))


def entry_operations(text: str) -> list[Operation]:
    """What a program without loops runs."""
    computations = parse_computations(text)
    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
    if entry is None:
        raise ValueError("the program has no entry")
    return _operations(entry[1], computations)


def _operations(name: str, computations: Mapping[str, Sequence[Instruction]]) -> list[Operation]:
    operations: list[Operation] = []
    for found in computations[name]:
        if found.opcode == "conditional":
            branches = [_operations(branch, computations) for branch in found.all_called]
            operations += min(branches, key=lambda branch: sum(operation.cycles for operation in branch))
        elif found.opcode in ("call", "while"):
            operations += _operations(_called(found, "to_apply" if found.opcode == "call" else "body"), computations)
        elif found.opcode not in _FREE and not found.opcode.endswith("-done"):
            operations += [_operation(found, computations)]
    return [
        operation for operation in operations if operation.cycles or operation.is_copied or _is_attention(operation)
    ]


def _operation(found: Instruction, computations: Mapping[str, Sequence[Instruction]]) -> Operation:
    inside = list(_inside(found, computations))
    opcodes = {one.opcode for one in inside}
    where = _OP_NAME.search(found.line)
    kind: Kind = "glue"
    if opcodes & _PRODUCTS:
        kind = "products"
    elif found.opcode.startswith(_EXCHANGES):
        kind = "exchange"
    elif found.opcode == "custom-call" and found.name.startswith("paged_attention"):
        kind = "attention"
    elif "rsqrt" in opcodes or _is_of_norm(found, inside):
        kind = "norms"
    is_copied = found.opcode.endswith("-start") and kind == "glue"
    cycles = 0 if kind == "attention" or is_copied else _cycles(found)
    return Operation(kind, found.name, found.type, where[1] if where else "", cycles, is_copied)


def _is_attention(operation: Operation) -> bool:
    return operation.kind == "attention"


def _is_of_norm(found: Instruction, inside: Sequence[Instruction]) -> bool:
    """Whether it sums squares of hidden states, or widens a slice of scales."""
    sums = any(one.opcode == "reduce" and one.type.startswith("f32[") for one in inside)
    return sums or ("dynamic-slice" in {one.opcode for one in inside} and found.type.startswith(("(f32[1,", "f32[1,")))


def _inside(found: Instruction, computations: Mapping[str, Sequence[Instruction]]) -> Iterator[Instruction]:
    yield found
    for name in found.all_called:
        for one in computations.get(name, ()):
            yield from _inside(one, computations)


def _called(found: Instruction, key: str) -> str:
    match = re.search(rf"\b{key}=%?([\w.\-]+)", found.line)
    if match is None:
        raise ValueError(f"{found.name} names no {key}")
    return match[1]


def _cycles(found: Instruction) -> int:
    """What libtpu notes, or the bytes of the result, read and written, at the memory's rate."""
    if found.opcode == "custom-call" and "tpu_custom_call" not in found.line:
        return 0  # arrays that lie side by side are called one
    if estimate := _ESTIMATE.search(found.line):
        return int(estimate[1])
    num_bytes = sum(_num_bytes(*array) for array in _ARRAY.findall(found.type))
    return 0 if num_bytes <= 4 else SMALLEST_FUSION + 2 * num_bytes // BYTES_PER_CYCLE


def _num_bytes(kind: str, bits: str, dims: str) -> int:
    num_bits = 8 if kind == "pred" else int(bits or 0)
    return math.prod(int(size) for size in dims.split(",") if size) * num_bits // 8


def compile_step(topology_name: str, num_tokens: int) -> str:
    """The text of a forward call, compiled in this process."""
    mesh = build_mesh(compile_only_devices(find_topology(topology_name)))
    config = dataclasses.replace(KNOWN_MODELS["llama-3-8b"].config, num_layers=NUM_LAYERS)
    options = EngineConfig.load({**_OPTIONS, "num_blocks": 2048, "tensor_parallel_size": mesh.size})
    step, geometry, params = abstract_serving(Model(config, jnp.dtype("bfloat16")), options, mesh)
    lowerings = {str(spec): lower for spec, lower in program_lowerings(step, params, geometry).items()}
    return lowerings[f"forward[{num_tokens}]"]().compile().as_text() or ""


def count(topology: str, tokens: Sequence[int]) -> list[StepCycles]:
    """What the steps of so many tokens take, compiled in a process of its own."""
    lines = run("-m", "benchmarks.tpu_step", "--here", "--topology", topology, "--tokens", *map(str, tokens))
    found = [json.loads(line.removeprefix(_MARK)) for line in lines.splitlines() if line.startswith(_MARK)]
    return [
        StepCycles(one["topology"], one["num_tokens"], tuple(Operation(**fields) for fields in one["operations"]))
        for one in found
    ]


def table(steps: Sequence[StepCycles]) -> Table:
    """A step a row; cycles of a layer."""
    shown = Table(title="Cycles of a layer as libtpu estimates them, attention kernels left out")
    kinds = [kind for kind in get_args(Kind) if kind != "attention"]
    for name in ("topology", "tokens", *kinds, "glue %", "small operations", "copies"):
        shown.add_column(name, justify="left" if name == "topology" else "right")
    for step in steps:
        cycles = [str(step.cycles(kind)) for kind in kinds]
        counts = str(step.num_small), str(step.num_copies)
        shown.add_row(step.topology, str(step.num_tokens), *cycles, f"{100 * step.glue_share:.1f}", *counts)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the cycles of a step on TPUs that are not here.")
    parser.add_argument("--topology", nargs="+", default=["v6e:1x1", "v6e:2x4"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 2048])
    parser.add_argument("--operations", action="store_true", help="print every operation that is no product")
    parser.add_argument("--save", action="store_true", help="record the table in benchmarks/results")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.here:
        for topology, num_tokens in itertools.product(chosen.topology, chosen.tokens):
            operations = layer_operations(compile_step(topology, num_tokens))
            step = StepCycles(topology, num_tokens, tuple(operations))
            sys.stdout.write(_MARK + json.dumps(dataclasses.asdict(step)) + "\n")
        return
    steps = [step for topology in chosen.topology for step in count(topology, chosen.tokens)]
    console = Console()
    for step in steps if chosen.operations else ():
        for operation in step.operations:
            if not operation.is_copied:
                console.print(
                    f"{operation.cycles:8d} {operation.kind:9s} {operation.name[:36]:36s} {operation.result[:64]:64s} "
                    f"{operation.where[-48:]}",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )
    console.print(table(steps))
    if chosen.save:
        kinds = get_args(Kind)
        rows = [
            {"topology": step.topology, "num_tokens": step.num_tokens, "num_small": step.num_small}
            | {"num_copies": step.num_copies, "cycles": {kind: step.cycles(kind) for kind in kinds}}
            for step in steps
        ]
        save("tpu_step", " ".join(["python -m benchmarks.tpu_step", *sys.argv[1:]]), {"steps": rows})


if __name__ == "__main__":
    main()
