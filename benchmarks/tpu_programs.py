"""One model's programs, lowered as a server lowers them and compiled for the TPUs of a topology by libtpu.

    python -m benchmarks.tpu_programs CELL...      in a process of `compiler_environment`; prints a line of JSON each

A cell is spelled `model@topology#program,program`, with `/backend` behind the topology for another than `auto` takes:
`llama-3-8b@v6e:2x4#forward[64],sample[64],sample[64, top]`. Weights are bfloat16, or as one of `FORMATS` has them
(`llama-3-8b+int4@v6e:1x1#forward[64]`), split over all devices of it; the pool takes what a server would give it, nine
tenths of the memory without the weights. Where that is less than two of the model's longest sequences it takes those,
and the compiler has to say that it does not fit.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.made_arrays import MadeArray, made_arrays
from jpaged import json_text
from jpaged.capacity.known_models import KNOWN_MODELS
from jpaged.capacity.target import find_target
from jpaged.config import EngineConfig
from jpaged.device.aot.hlo import Collective, collectives, computations_of
from jpaged.device.aot.tpu import compile_only_devices, compiler_environment, find_topology
from jpaged.device.mesh import build_mesh, local_bytes
from jpaged.device.programs.compile import ProgramSpec
from jpaged.device.programs.lowering import abstract_serving, program_lowerings
from jpaged.device.programs.report import ProgramReport
from jpaged.device.step.forward import Step
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.models.quantisation.rules import Quantisation

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "block_size": 32}
_INT8_ROWS, _INT4 = MatrixFormat("int8", activations="int8"), MatrixFormat("int4", 128, has_zeros=True)
FORMATS: Mapping[str, tuple[tuple[str, MatrixFormat], ...]] = {
    "int8": (("", MatrixFormat("int8")),),
    "int8-rows": (("", _INT8_ROWS),),
    "int4": (("", _INT4),),
    "int4-listed": (("", dataclasses.replace(_INT4, has_group_ids=True)),),
    "int8-int4": (("self_attn", _INT8_ROWS), ("", _INT4)),
    "fp8-rows": (("", MatrixFormat("fp8", activations="fp8")),),
    "fp8-groups": (("", MatrixFormat("fp8", 128, activations="fp8-groups")),),
    "mxfp4": (("", MatrixFormat("mxfp4", 32)),),
}
"""Which matrices of layers are quantised, and how; where rows are named, those of products are rounded, too."""
_CELL = re.compile(
    r"(?P<model>[\w.-]+)(?:\+(?P<format>[\w-]+))?@(?P<topology>[\w:]+)(?:/(?P<backend>[\w-]+))?#(?P<programs>.+)"
)
Lowerings = Mapping[ProgramSpec, Callable[[], jax.stages.Lowered]]
_MARK = "RESULT "
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
_SMALL = 1 << 20  # elements; arrays of fewer, such as biases, are not looked for


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """A program on one device of its topology; all bytes are of that device.

    Attributes:
        cell: `model@topology`, with the backend if one was named.
        program: as `ProgramSpec` writes it.
        num_devices: that the model is split over.
        backend: whose attention kernel it is.
        num_blocks: of the pool.
        weight_bytes: of all parameters.
        pool_bytes: of the pool.
        made: arrays of the size of the pool, of a weight, or of one layer's part of either, that it makes, and those of
            the size of all logits that it copies.
        products: the types that matrices are multiplied in, such as `s8*s8=s32`, widened before or not.
        collectives: what devices exchange.
        report: the memory that it takes; None if it does not fit.
        out_of_memory: what the compiler says then; else None.
        lower_s: for tracing and lowering.
        compile_s: for compiling, by the clock.
        compile_cpu_s: for compiling, of this process's threads together: it does not grow with the machine's load.
    """

    cell: str
    program: str
    num_devices: int
    backend: str
    num_blocks: int
    weight_bytes: int
    pool_bytes: int
    made: tuple[str, ...]
    products: tuple[str, ...]
    collectives: tuple[Collective, ...]
    report: ProgramReport | None
    out_of_memory: str | None
    lower_s: float
    compile_s: float
    compile_cpu_s: float


def library() -> Path:
    """The libtpu.so that is used: TPU_LIBRARY_PATH, else the one that `make aot` installs.

    Raises:
        FileNotFoundError: it is not there.
    """
    path = Path(os.environ.get("TPU_LIBRARY_PATH") or Path(sys.prefix) / "aot" / "libtpu" / "libtpu.so")
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: run `make aot`, which installs the libtpu that belongs to this jax"
        )
    return path


def run(*arguments: str) -> str:
    """Runs Python with these arguments as a process that compiles for TPUs, and returns what it prints.

    Raises:
        RuntimeError: it failed; the end of what it said is in the message.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **compiler_environment(library())},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def compile_cells(*cells: str) -> list[ProgramResult]:
    """The results of some cells, compiled in a process of its own."""
    lines = run("-m", "benchmarks.tpu_programs", *cells).splitlines()
    return [_parse(json.loads(line.removeprefix(_MARK))) for line in lines if line.startswith(_MARK)]


def _parse(fields: dict) -> ProgramResult:
    report = fields.pop("report")
    made, products = (tuple(fields.pop(name)) for name in ("made", "products"))
    exchanged = tuple(
        Collective(**{**one, "dims": tuple(map(tuple, one["dims"])), "loop_trips": tuple(one["loop_trips"])})
        for one in fields.pop("collectives")
    )
    return ProgramResult(
        **fields,
        made=made,
        products=products,
        collectives=exchanged,
        report=None if report is None else ProgramReport(**report),
    )


def compile_cell(cell: str) -> list[ProgramResult]:
    """The programs of one cell, in this process."""
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ValueError(f"{cell!r} is not spelled model[+format]@topology[/backend]#program,...")
    step, params, lowerings = _serving(match["model"], match["format"], match["topology"], match["backend"])
    specs = {str(spec): spec for spec in lowerings}
    return [
        _compile(cell.partition("#")[0], specs[program], lowerings[specs[program]], step, params)
        for program in re.split(r",(?! )", match["programs"])
    ]


def _serving(
    model_name: str, form: str | None, topology_name: str, backend: str | None
) -> tuple[Step, Params, Lowerings]:
    topology = find_topology(topology_name)
    mesh = build_mesh(compile_only_devices(topology))
    config = KNOWN_MODELS[model_name].config
    if form is not None:
        config = dataclasses.replace(config, quantisation=Quantisation(form, FORMATS[form]))
    model = Model(config, jnp.dtype("bfloat16"))
    options = {**OPTIONS, "tensor_parallel_size": mesh.size, "attention_backend": backend or "auto"}
    least, geometry, params = abstract_serving(model, EngineConfig.load(options), mesh)
    free = 0.9 * find_target(topology_name).hardware.usable_bytes - local_bytes(params)
    num_blocks = max(2 * geometry.num_blocks, int(free // least.layout.local.bytes_per_block) - 1)
    step, geometry, params = abstract_serving(model, EngineConfig.load({**options, "num_blocks": num_blocks}), mesh)
    return step, params, program_lowerings(step, params, geometry)


def _compile(
    cell: str, spec: ProgramSpec, lowering: Callable[[], jax.stages.Lowered], step: Step, params: Params
) -> ProgramResult:
    begin = time.perf_counter()
    lowered = lowering()
    lowered_at, cpu_begin = time.perf_counter(), time.process_time()
    report, out_of_memory = None, None
    made: tuple[str, ...] = ()
    products: tuple[str, ...] = ()
    exchanged: tuple[Collective, ...] = ()
    try:
        executable = lowered.compile()
        exchanged = tuple(collectives(executable))
        products = tuple(sorted(set(_products(executable.as_text() or ""))))
        report = ProgramReport.of(executable)
        arrays = [*made_arrays(executable, _sizes(step, params, spec)), *_copied_logits(executable, step, spec)]
        made = tuple(f"{array.opcode}{list(array.dims)}" for array in arrays)
    except jax.errors.JaxRuntimeError as error:
        if _OUT_OF_MEMORY not in str(error):
            raise
        out_of_memory = str(error).splitlines()[0]
    layout = step.layout.local
    return ProgramResult(
        cell=cell,
        program=str(spec),
        num_devices=step.mesh.size,
        backend=step.backend,
        num_blocks=layout.num_blocks,
        weight_bytes=local_bytes(params),
        pool_bytes=layout.num_bytes,
        made=made,
        products=products,
        collectives=exchanged,
        report=report,
        out_of_memory=out_of_memory,
        lower_s=round(lowered_at - begin, 2),
        compile_s=round(time.perf_counter() - lowered_at, 2),
        compile_cpu_s=round(time.process_time() - cpu_begin, 2),
    )


def _sizes(step: Step, params: Params, spec: ProgramSpec) -> set[int]:
    """Elements of the pool, of a layer of it, of each weight and of a layer of it, unless activations are as large.

    A program that moves blocks has no weights.
    """
    layout, config = step.layout.local, step.model.config
    pool = math.prod(layout.shape)
    sizes = {pool, pool // layout.num_layers}
    if spec.kind not in ("forward", "sample"):
        return sizes
    for name, tree in params.items():
        for leaf in jax.tree.leaves(tree):
            size = math.prod(leaf.sharding.shard_shape(leaf.shape))
            sizes |= {size, size // leaf.shape[0]} if name == "layers" else {size}
    heads, groups = config.num_heads // step.mesh.size, layout.num_kv_heads
    inner = config.intermediate_size // step.mesh.size
    widths = (config.hidden_size, inner, 2 * inner, heads * config.head_dim, (heads + 2 * groups) * config.head_dim)
    return {size for size in sizes if size >= _SMALL} - {spec.size * width for width in widths}


def _products(text: str) -> Iterator[str]:
    """The types of each matrix product of a program: of its operands and of its result."""
    for body in computations_of(text).values():
        types = {found.name: found.type.partition("[")[0] for found in body}
        for found in body:
            if found.opcode in ("dot", "convolution"):
                operands = re.findall(r"%([\w.\-]+)", found.line.partition(f" {found.opcode}(")[2])[:2]
                yield f"{'*'.join(types.get(name, '?') for name in operands)}={types[found.name]}"


def _copied_logits(executable: jax.stages.Compiled, step: Step, spec: ProgramSpec) -> list[MadeArray]:
    """What a sample copies of all its logits: it may change them, and make others."""
    if spec.kind != "sample":
        return []
    size = spec.size * step.model.config.vocab_size // step.mesh.size
    return [array for array in made_arrays(executable, {size}) if array.opcode.startswith("copy")]


def main(cells: Sequence[str]) -> None:
    for cell in cells:
        for result in compile_cell(cell):
            print(_MARK + json_text.dumps(dataclasses.asdict(result)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
