"""One model's programs, lowered as a server lowers them and compiled for the TPUs of a topology by libtpu.

    python -m benchmarks.tpu_programs CELL...      in a process of `compiler_environment`; prints a line of JSON each
    python -m benchmarks.tpu_programs --exchange   counts what devices exchange in the steps that aot_tpu recorded

A cell is spelled `model@topology#program,program`, with `/backend` behind the topology for another than `auto` takes:
`llama-3-8b@v6e:2x4#forward[64],sample[64],sample[64, top]`. Weights are bfloat16, or as one of `FORMATS` has them
(`llama-3-8b+int4@v6e:1x1#forward[64]`), split over all devices of it, or over those that share no context, where `*2`
behind the topology has each context on two; the pool takes what a server would give it, nine tenths of the memory
without the weights. Where that is less than two of the model's longest sequences, of at most 2**18 tokens, it takes
those, and the compiler has to say that it does not fit. `+lora` comes last, and has adapters beside the weights: 8
slots of rank 16, as a server has them unless it is told otherwise
(`llama-3-8b+int8+lora@v6e:1x1#forward[64],load_adapter[1]`). `+ep` has whole experts on each device, and `+dp` the
attention of its own sequences, too
(`deepseek-v2-lite+dp@v6e:2x2#forward[64]`). Steps have up to 512 tokens and 64 rows, or those of the cell's largest
forward.

A ring over n devices sends 2 (n - 1) / n of an all-reduce's bytes over each of its links (`_ring_share`). An exchange
takes those bytes at the plan's rate of the links, and the plan's hops once. While it is in flight, the device runs the
instructions between its start and its done, for which libtpu notes cycles:

    exposed time  = the exchange's time - cycles between start and done / clock,  at least 0
    exposed bytes = the share of its bytes that the exposed time is of its time

A ragged all-to-all sends the rows that a step is expected to: its arrays have room for any choice of experts. On a ring
of n devices a message passes n / 4 links on average, in one of two directions.

A synchronous exchange is exposed as a whole, and so is one whose done follows its start. Exchanges in flight at once
are assumed to run one after another. Stalls, and what an exchange takes of the memory's bandwidth, are not counted.
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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks.made_arrays import MadeArray, made_arrays
from benchmarks.record import RESULTS, put_on_page, save
from jpaged import json_text
from jpaged.config import EngineConfig
from jpaged.device.aot.deployment import Collective, collectives, parse_computations
from jpaged.device.aot.topology import compile_only_devices, compiler_environment, find_topology
from jpaged.device.compilation.compile import ProgramSpec
from jpaged.device.compilation.lowering import abstract_serving, program_lowerings
from jpaged.device.compilation.memory_plan import ProgramReport
from jpaged.device.lora import get_matrices
from jpaged.device.mesh import build_mesh, local_bytes, num_context_parts, num_shards
from jpaged.device.step import Step
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.models.config import Quantization
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.models.sharding import with_dp_attention, with_parallel_experts
from jpaged.plan.cost import StepLoad
from jpaged.plan.known_models import KNOWN_MODELS
from jpaged.plan.step_times import PlannedModel, PlannedStepTimes, find_target

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
    "mxfp4-experts": (("experts", MatrixFormat("mxfp4", 32)),),
}
"""Which matrices of layers are quantized, and how; where rows are named, those of products are rounded, too."""
_CELL = re.compile(
    r"(?P<model>[\w.-]+)(?:\+(?!(?:lora|ep|dp|eplb)@)(?P<format>[\w-]+))?(?:\+(?P<parallel>eplb|ep|dp))?(?P<lora>\+lora)?@"
    r"(?P<topology>[\w:]+)(?:\*(?P<contexts>\d+))?(?:/(?P<backend>[\w-]+))?#(?P<programs>.+)"
)
Lowerings = Mapping[ProgramSpec, Callable[[], jax.stages.Lowered]]
_MARK = "RESULT "
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
_MOST_ROWS = 256
"""Forwards of up to so many tokens decode one token of each row."""
_LONGEST = 2**18
"""Most tokens of a sequence: the pool has two of them at least."""
_SMALL = 1 << 20  # elements; arrays of fewer, such as biases, are not looked for


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """A program on one device of its topology; all bytes are of that device.

    Attributes:
        cell: `model@topology`, with the backend if one was named.
        program: as `ProgramSpec` writes it.
        num_devices: that the model and its contexts are split over.
        backend: whose attention kernel it is.
        num_blocks: of the pool.
        weight_bytes: of all parameters, adapters in their slots included.
        adapter_bytes: of the adapters.
        pool_bytes: of the pool.
        made: arrays of the size of the pool, of a weight, or of one layer's part of either, that it makes, and those of
            the size of all logits that it copies.
        adapter_bytes_read: of the adapters' stacks in all layers of a step.
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
    adapter_bytes: int
    pool_bytes: int
    made: tuple[str, ...]
    adapter_bytes_read: int
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
        raise ValueError(f"{cell!r} is not spelled model[+format][+lora]@topology[*contexts][/backend]#program,...")
    config = KNOWN_MODELS[match["model"]].config
    if (form := match["format"]) is not None:
        config = dataclasses.replace(config, quantization=Quantization(form, FORMATS[form]))
    sizes = [OPTIONS["max_num_batched_tokens"], *map(int, re.findall(r"forward\[(\d+)\]", match["programs"]))]
    own: dict[str, Any] = {"attention_backend": match["backend"] or "auto", "enable_lora": match["lora"] is not None}
    own["max_num_batched_tokens"] = max(sizes)
    own["max_model_len"] = min(config.max_model_len, _LONGEST)
    own["max_num_seqs"] = max(OPTIONS["max_num_seqs"], *(size for size in sizes if size <= _MOST_ROWS), 0)
    if match["parallel"] is not None:
        config = with_parallel_experts(config)
        own["enable_expert_parallel"] = True
    if match["parallel"] in ("dp", "eplb"):
        config = with_dp_attention(config)
        own["enable_dp_attention"] = True
    mesh = build_mesh(compile_only_devices(find_topology(match["topology"])), int(match["contexts"] or 1))
    if match["parallel"] == "eplb":
        own |= {"enable_eplb": True, "eplb_config": {"num_redundant_experts": num_shards(mesh)}}
    step, params, lowerings = _serving(Model(config, jnp.dtype("bfloat16")), match["topology"], mesh, own)
    specs = {str(spec): spec for spec in lowerings}
    return [
        _compile(cell.partition("#")[0], specs[program], lowerings[specs[program]], step, params)
        for program in re.split(r",(?! )", match["programs"])
    ]


def _serving(model: Model, topology_name: str, mesh: Mesh, own: Mapping[str, Any]) -> tuple[Step, Params, Lowerings]:
    num_contexts = num_context_parts(mesh)
    sizes = {"tensor_parallel_size": num_shards(mesh), "context_parallel_size": num_contexts}
    options = {**OPTIONS, "block_size": OPTIONS["block_size"] * num_contexts, **sizes, **own}
    least, geometry, params = abstract_serving(model, EngineConfig.load(options), mesh)
    states = sum(math.prod(one.shape) * one.dtype.itemsize for one in least.abstract_states(geometry.max_num_seqs))
    free = 0.9 * find_target(topology_name).hardware.usable_bytes - local_bytes(params) - states / num_shards(mesh)
    of_checkpoints = -(-geometry.state_bytes // max(1, geometry.blocks_per_checkpoint))
    bytes_per_block = least.layout.local.bytes_per_block + of_checkpoints
    of_rank = max(2 * geometry.num_blocks_of_rank, int(free // bytes_per_block) - 1)
    num_blocks = of_rank * geometry.dp_size
    step, geometry, params = abstract_serving(model, EngineConfig.load({**options, "num_blocks": num_blocks}), mesh)
    return step, params, program_lowerings(step, params, geometry)


def _compile(
    cell: str, spec: ProgramSpec, lowering: Callable[[], jax.stages.Lowered], step: Step, params: Params
) -> ProgramResult:
    begin = time.perf_counter()
    lowered = lowering()
    lowered_at, cpu_begin = time.perf_counter(), time.process_time()
    report, out_of_memory, adapter_bytes_read = None, None, 0
    made: tuple[str, ...] = ()
    products: tuple[str, ...] = ()
    exchanged: tuple[Collective, ...] = ()
    try:
        executable = lowered.compile()
        exchanged = tuple(collectives(executable))
        text = executable.as_text() or ""
        products, adapter_bytes_read = tuple(sorted(set(_products(text)))), _adapter_bytes_read(text, params)
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
        adapter_bytes=local_bytes({"slots": list(get_matrices(params).values())}),
        pool_bytes=layout.num_bytes,
        made=made,
        adapter_bytes_read=adapter_bytes_read,
        products=products,
        collectives=exchanged,
        report=report,
        out_of_memory=out_of_memory,
        lower_s=round(lowered_at - begin, 2),
        compile_s=round(time.perf_counter() - lowered_at, 2),
        compile_cpu_s=round(time.process_time() - cpu_begin, 2),
    )


def _sizes(step: Step, params: Params, spec: ProgramSpec) -> set[int]:
    """Elements of the pool, of a layer of it, of each weight, of a layer and of an expert of it, unless activations are
    as large.

    The adapters of all slots are such weights, however small. A program that moves blocks has none.
    """
    layout, config = step.layout.local, step.model.config
    pool, of_adapters = math.prod(layout.shape), _elements(get_matrices(params), is_stacked=True)
    sizes = {pool, pool // layout.num_layers}
    if spec.kind == "load_adapter":
        return of_adapters
    if spec.kind not in ("forward", "sample"):
        return sizes
    for name, tree in params.items():
        sizes |= _elements(tree, is_stacked=name == "layers")
    num_sharing = num_shards(step.mesh)
    heads, groups = config.num_heads // num_sharing, layout.num_kv_heads
    inner = config.intermediate_size // num_sharing
    kv = 2 * groups * config.head_dim
    widths = (config.hidden_size, inner, 2 * inner, heads * config.head_dim, kv, heads * config.head_dim + kv)
    large = {size for size in sizes if size >= _SMALL}
    return (large | of_adapters) - {spec.size * width for width in widths}


def _elements(tree: Any, *, is_stacked: bool) -> set[int]:
    """Numbers in a device's part of each array, in a layer where layers are stacked, and in one expert."""
    sizes = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        shape = leaf.sharding.shard_shape(leaf.shape)
        sizes |= {math.prod(part) for part in ((shape, shape[1:]) if is_stacked else (shape,))}
        if jax.tree_util.DictKey("experts") in path:
            sizes.add(math.prod(shape[2:]))
    return sizes


def _products(text: str) -> Iterator[str]:
    """The types of each matrix product of a program: of its operands and of its result."""
    for body in parse_computations(text).values():
        types = {found.name: found.type.partition("[")[0] for found in body}
        for found in body:
            if found.opcode in ("dot", "convolution"):
                operands = re.findall(r"%([\w.\-]+)", found.line.partition(f" {found.opcode}(")[2])[:2]
                yield f"{'*'.join(types.get(name, '?') for name in operands)}={types[found.name]}"


def _adapter_bytes_read(text: str, params: Params) -> int:
    """Bytes of the slices that a step takes of adapters' stacks, a layer at a time: a slice of one is a read of it."""
    num_read = 0
    shapes = {leaf.sharding.shard_shape(leaf.shape): leaf.dtype for leaf in jax.tree.leaves(get_matrices(params))}
    for shape, dtype in shapes.items():
        layer = ",".join(map(str, (1, *shape[1:])))
        sliced = re.findall(rf" = \w+\[{layer}\]\S* dynamic-slice\(", text)
        num_read += len(sliced) * math.prod(shape) * dtype.itemsize
    return num_read


def _copied_logits(executable: jax.stages.Compiled, step: Step, spec: ProgramSpec) -> list[MadeArray]:
    """What a sample copies of all its logits: it may change them, and make others."""
    if spec.kind != "sample":
        return []
    size = spec.size * step.model.config.vocab_size // num_shards(step.mesh)
    return [array for array in made_arrays(executable, {size}) if array.opcode.startswith("copy")]


@dataclass(frozen=True, slots=True)
class Exchange:
    """What each device exchanges in a program, with the trips of loops.

    Attributes:
        num_collectives: by opcode.
        link_bytes: over each link of a ring of all devices, one way.
        exposed_bytes: the part of link_bytes that is sent while the device computes nothing.
        exposed_s: its estimated time, at the plan's share of the links; see the module.
        step_s: the plan's estimate of the whole step, with this time for its sums.
    """

    cell: str
    program: str
    num_devices: int
    num_collectives: Mapping[str, int]
    link_bytes: int
    exposed_bytes: int
    exposed_s: float
    step_s: float

    @classmethod
    def count(cls, result: ProgramResult) -> Exchange:
        """Count the collectives of a forward program.

        Raises:
            ValueError: a collective is in a loop whose trip count is unknown.
        """
        counts: Counter[str] = Counter()
        link_bytes, exposed_bytes, exposed_s = 0, 0, 0.0
        planned, load = _plan_step(result)
        clock_hz = planned.target.hardware.clock_hz
        for one in result.collectives:
            if None in one.loop_trips:
                raise ValueError(f"{one.instruction} of {result.cell} is in a loop of unknown trip count")
            trips = math.prod(trips or 0 for trips in one.loop_trips)
            counts[one.opcode] += trips
            num_bytes = _ring_share(one.opcode, result.num_devices) * one.num_bytes
            if one.opcode == "ragged-all-to-all" and planned.messages is not None:
                n = result.num_devices
                num_bytes = planned.messages.sent_bytes(load.num_tokens, planned.hidden_size, n) * n * n / (8 * (n - 1))
            seconds = planned.exchange_s(num_bytes)
            hidden_s = 0.0 if clock_hz is None else min(seconds, one.hidden_cycles / clock_hz)
            link_bytes += round(trips * num_bytes)
            exposed_bytes += round(trips * num_bytes * (1 - hidden_s / seconds))
            exposed_s += trips * (seconds - hidden_s)
        step_s = dataclasses.replace(planned.parts(load), sums_s=exposed_s).seconds
        cell, numbers = result.cell, dict(sorted(counts.items()))
        return cls(cell, result.program, result.num_devices, numbers, link_bytes, exposed_bytes, exposed_s, step_s)

    @property
    def exposed_share(self) -> float:
        """Share of the step during which devices only exchange."""
        return self.exposed_s / self.step_s


def _ring_share(opcode: str, num_devices: int) -> float:
    """Return the bytes over each link of a ring, as a multiple of those of the collective's result."""
    share = (num_devices - 1) / num_devices
    shares = {"all-reduce": 2 * share, "reduce-scatter": num_devices - 1.0, "collective-permute": 1.0}
    return shares.get(opcode, share)


def _number_bytes(collectives: Sequence[Collective]) -> float:
    """Return the mean bytes of an exchanged number; 2 without collectives."""
    num_numbers = sum(math.prod(dims) for one in collectives for dims in one.dims)
    return sum(one.num_bytes for one in collectives) / num_numbers if num_numbers else 2.0


def _plan_step(result: ProgramResult) -> tuple[PlannedStepTimes, StepLoad]:
    """Return the plan of a model, and a step's load: decoding rows with 1024 tokens each, or prompts of 1024 tokens."""
    num_tokens = int(result.program.removeprefix("forward[").removesuffix("]"))
    is_decode = num_tokens <= _MOST_ROWS
    load = StepLoad.decoding(num_tokens, 1024) if is_decode else StepLoad.prompts(num_tokens, 1024)
    return plan_model(result).step_times(), load


def plan_model(result: ProgramResult) -> PlannedModel:
    """Return the plan of a program's model, whose sums do not overlap."""
    name, _, topology = result.cell.partition("@")
    name, _, parallel = name.partition("+")
    config, num_devices, block_size = KNOWN_MODELS[name].config, result.num_devices, OPTIONS["block_size"]
    if parallel in ("dp", "eplb"):
        config = with_dp_attention(with_parallel_experts(config))
    return PlannedModel(
        config=config,
        kv_dtype="bfloat16",
        itemsize=2,
        target=find_target(topology),
        num_devices=num_devices,
        weight_bytes=result.weight_bytes,
        bytes_per_block=2 * config.num_layers * config.kv_width * block_size // num_devices,
        block_size=block_size,
        number_bytes=_number_bytes(result.collectives),
    )


def recorded_steps() -> list[ProgramResult]:
    """The forward programs for several devices in the record of `benchmarks.aot_tpu`."""
    programs = json.loads((RESULTS / "aot_tpu.json").read_text())["programs"]
    unnoted = {"adapter_bytes": 0, "adapter_bytes_read": 0, "products": []}  # by older records
    results = [_parse(unnoted | fields) for fields in programs if fields["program"].startswith("forward[")]
    return [result for result in results if result.report is not None and result.collectives and "/" not in result.cell]


def exchange_table(exchanges: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table: one row per program."""
    rows = [
        "| cell | program | devices | collectives | MiB over a link | exposed MiB | exposed, ms | of the step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in exchanges:
        collectives = ", ".join(f"{count} {opcode}" for opcode, count in one["num_collectives"].items())
        cells = [one["cell"], one["program"], str(one["num_devices"]), collectives]
        cells += [f"{one[name] / 2**20:.1f}" for name in ("link_bytes", "exposed_bytes")]
        cells += [f"{one['exposed_s'] * 1e3:.2f}", f"{one['exposed_share']:.0%}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def record_exchanges() -> None:
    """Count the exchanges of the recorded steps; write results/tpu_exchange.json and the table of the page."""
    found = [Exchange.count(result) for result in recorded_steps()]
    programs = [{**dataclasses.asdict(one), "exposed_share": one.exposed_share} for one in found]
    print(save("tpu_exchange", "python -m benchmarks.tpu_programs --exchange", {"programs": programs}))
    put_on_page({"exchange": exchange_table(programs)})


def main(cells: Sequence[str]) -> None:
    if cells == ["--exchange"]:
        record_exchanges()
        return
    for cell in cells:
        for result in compile_cell(cell):
            print(_MARK + json_text.dumps(dataclasses.asdict(result)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
