"""A server on devices that are not attached: plans its memory and compiles its programs, but runs nothing.

    largest programs, a pool of a GiB -> memory of programs -> the number of blocks -> the programs of that pool

Lack of memory is no error: the result describes what does not fit, with the compiler's message if it refused a program.

Collectives of a compiled program, and the loops around them, are parsed from its text.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
from jax.sharding import Mesh

from jpaged.config import EngineConfig
from jpaged.device.compilation.aot_bundle import CompileTarget, save_programs
from jpaged.device.compilation.compile import ProgramSpec, least_programs, set_up_compile_cache
from jpaged.device.compilation.lowering import ServerPrograms, abstract_serving
from jpaged.device.compilation.memory_plan import (
    CompilerOutOfMemory,
    DeviceMemory,
    MemoryPlan,
    ProgramReport,
    plan_memory,
    too_large,
)
from jpaged.device.compilation.program_registry import NUM_BACKGROUND_THREADS, NUM_THREADS, CompiledProgram
from jpaged.device.executor import waits_for_all_programs
from jpaged.device.mesh import first_device, get_dp_size
from jpaged.device.step_sizes import DeviceAttention
from jpaged.device.transfers import move_sizes
from jpaged.engine.executor import Geometry, Progress
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.hardware import GPU_MEMORY_SHARE
from jpaged.models.config import ModelConfig
from jpaged.models.model import Model

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*)?\{$")
_NAMES = re.compile(r"%([\w.\-]+)")
_TYPED_ARRAY = re.compile(r"(?P<kind>[a-z]+)(?P<bits>\d*)\w*\[(?P<dims>[\d,]*)\]")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|called_computations|branch_computations)"
    r"=\{?(?P<names>%[\w.\-]+(?:, ?%[\w.\-]+)*)"
)
_COLLECTIVES = {
    "all-reduce",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
    "send",
    "recv",
}
_STARTS = ("async-start", "call-start")
"""Instructions that start a computation while others run."""
_CHAIN = re.compile(r'chain_id="(\d+)"')
"""The copies of a collective that XLA for TPUs runs within other fusions: it starts in one, and is done in another."""
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_KNOWN_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_CONSTANT = re.compile(r" constant\((\d+)\)")


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective operation in a program's text.

    The compiler may combine several exchanges into one instruction; each array of it is one exchange of the model.

    Attributes:
        opcode: such as `all-reduce`; for an asynchronous one without `-start`.
        dims: the shape of each result array.
        num_bytes: of those arrays together, on one device.
        loop_trips: trip count of each enclosing loop, outermost first; None if unknown.
        instruction: the instruction's name in the program's text.
        is_async: it has a start and a done, between which the device computes.
        hidden_cycles: the compiler's estimate for the instructions between them. If several collectives are in flight,
            the first one gets all cycles, because they share the links.
    """

    opcode: str
    dims: tuple[tuple[int, ...], ...]
    num_bytes: int
    loop_trips: tuple[int | None, ...]
    instruction: str
    is_async: bool = False
    hidden_cycles: int = 0


@dataclass(frozen=True, slots=True)
class CompiledSum:
    """An all-reduce of a program.

    Attributes:
        num_runs: in one call of the program.
        num_bytes: bytes of the result on one device.
        hidden_cycles: as of `Collective`.
    """

    num_runs: int
    num_bytes: int
    hidden_cycles: int

    @classmethod
    def from_collectives(cls, found: Iterable[Collective]) -> tuple[CompiledSum, ...]:
        """Return the all-reduces among collectives; empty if one is in a loop whose trip count is unknown."""
        sums = [one for one in found if one.opcode == "all-reduce"]
        if any(None in one.loop_trips for one in sums):
            return ()
        return tuple(
            cls(math.prod(trips or 0 for trips in one.loop_trips), one.num_bytes, one.hidden_cycles) for one in sums
        )


def collectives(executable: jax.stages.Compiled) -> list[Collective]:
    """Return every collective of a program, including those in loops, branches and fusions."""
    return list(collectives_in(executable.as_text() or ""))


def collectives_in(text: str) -> Iterator[Collective]:
    """Yield the collectives of a program's text. A computation called from two places is yielded twice."""
    computations = parse_computations(text)
    called = {name for body in computations.values() for found in body for name in found.all_called}
    for name in computations:
        if name not in called:
            yield from _collectives_from(name, computations, ())


def _collectives_from(
    name: str,
    computations: Mapping[str, Sequence[Instruction]],
    loop_trips: tuple[int | None, ...],
    is_async: bool = False,
    hidden_cycles: int = 0,
) -> Iterator[Collective]:
    body = computations.get(name, ())
    hidden = _hidden_cycles(body, computations)
    for found in body:
        opcode = found.opcode.removesuffix("-start")
        cycles = hidden.get(found.name, hidden_cycles)
        if opcode in _COLLECTIVES:
            arrays = _exchanged(found)
            dims = tuple(dims for dims, _ in arrays)
            num_bytes, is_start = sum(size for _, size in arrays), found.opcode.endswith("-start")
            yield Collective(opcode, dims, num_bytes, loop_trips, found.name, is_async or is_start, cycles)
        chain = _find_chain(found, computations)
        if chain is not None and not chain[1]:
            continue  # counted at the start
        starts = found.opcode in _STARTS or chain is not None
        inner = (*loop_trips, _trips(found, computations)) if found.opcode == "while" else loop_trips
        for callee in found.all_called:
            yield from _collectives_from(callee, computations, inner, is_async or starts, cycles)


def _find_chain(found: Instruction, computations: Mapping[str, Sequence[Instruction]]) -> tuple[str, bool] | None:
    """Return the chain of a fusion's collective, and whether it starts there; None if it has none."""
    if found.opcode != "fusion":
        return None
    inside = [one.line for callee in found.all_called for one in computations.get(callee, ())]
    chains = [match[1] for line in inside if (match := _CHAIN.search(line))]
    return (chains[0], any('"AsyncCollectiveStart"' in line for line in inside)) if chains else None


def _hidden_cycles(body: Sequence[Instruction], computations: Mapping[str, Sequence[Instruction]]) -> Mapping[str, int]:
    """Return the estimated cycles between start and done of each collective that a scheduled computation starts."""
    in_flight: dict[str, str] = {}  # a chain, or the name of a start -> the start
    hidden: dict[str, int] = {}
    for found in body:
        chain = _find_chain(found, computations)
        is_start = found.opcode in _STARTS or found.opcode.removesuffix("-start") in _COLLECTIVES
        if chain is not None and chain[1]:
            in_flight[f"chain {chain[0]}"], hidden[found.name] = found.name, 0
        elif is_start and found.opcode.endswith("-start"):
            in_flight[found.name], hidden[found.name] = found.name, 0
        elif found.opcode.endswith("-done"):
            in_flight.pop(_NAMES.findall(found.line.partition("-done(")[2])[0], None)
        elif chain is not None and _is_done(found, computations):
            in_flight.pop(f"chain {chain[0]}", None)
        elif in_flight and (estimate := _CYCLES.search(found.line)):
            hidden[next(iter(in_flight.values()))] += int(estimate[1])
    return hidden


def _is_done(found: Instruction, computations: Mapping[str, Sequence[Instruction]]) -> bool:
    return any(
        '"AsyncCollectiveDone"' in one.line for callee in found.all_called for one in computations.get(callee, ())
    )


def _exchanged(instruction: Instruction) -> list[tuple[tuple[int, ...], int]]:
    """Return shape and bytes of each result of a collective.

    The result of an asynchronous start may also list its operands first, and counters last.
    """
    arrays = []
    for array in _TYPED_ARRAY.finditer(instruction.type):
        dims = tuple(int(size) for size in array["dims"].split(",") if size)
        bits = 8 if array["kind"] == "pred" else int(array["bits"] or 0)
        arrays.append((dims, array["kind"], -(-math.prod(dims) * bits // 8)))
    if instruction.opcode in ("all-gather-start", "collective-permute-start", "all-to-all-start"):
        arrays = [array for array in arrays if array[:2] != ((), "u")]
        arrays = arrays[len(arrays) // 2 :]
    return [(dims, size) for dims, kind, size in arrays if kind != "token"]


def _trips(loop: Instruction, computations: Mapping[str, Sequence[Instruction]]) -> int | None:
    """Return a loop's trip count; None if unknown.

    It comes from the compiler's annotation, or from the only constant that the counter is compared with.
    """
    if known := _KNOWN_TRIPS.search(loop.line.replace("\\", "")):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", loop.line)
    lines = [found.line for found in computations.get(condition[1], ())] if condition else []
    limits = [constant[1] for line in lines if (constant := _CONSTANT.search(line))]
    counts_up = any("direction=LT" in line for line in lines)
    return int(limits[0]) if counts_up and len(limits) == 1 else None


@dataclass(frozen=True, slots=True)
class Instruction:
    """A line of a program's text."""

    name: str
    opcode: str
    type: str
    line: str

    @property
    def all_called(self) -> list[str]:
        """Every computation that it calls, including the operator of a reduction."""
        return [name for match in _CALLED.finditer(self.line) for name in _NAMES.findall(match["names"])]


def parse_computations(text: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each computation of a program's text."""
    computations: dict[str, list[Instruction]] = {}
    body: list[Instruction] = []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            body = computations.setdefault(header["name"], [])
        elif found := _INSTRUCTION.match(line):
            body.append(Instruction(found["name"], found["opcode"], found["type"], line))
    return computations


_WHAT = "the memory that programs may use on this kind of device"


@dataclass(frozen=True, slots=True)
class Models:
    """A model as published, and its draft model if the options require one."""

    model: Model
    draft: Model | None = None


@dataclass(frozen=True, slots=True)
class PlannedProgram:
    """A compiled program: its name, the seconds of compilation, and the compiler's report on its memory."""

    name: str
    seconds: float
    report: ProgramReport


@dataclass(frozen=True, slots=True)
class StartEstimate:
    """Programs of a start without a compile cache, and estimated seconds of compiling them on a machine like this one.

    Attributes:
        num_first: programs that are needed before the first request.
        first_s: seconds until those are compiled.
        num_later: programs that are compiled in the background while requests run.
        later_s: further seconds until those are compiled, on idle processors.
        num_timed: programs whose compilation was timed; others count as the mean of their kind, or of all.
    """

    num_first: int
    first_s: float
    num_later: int
    later_s: float
    num_timed: int

    @classmethod
    def of(
        cls, programs: Sequence[ProgramSpec], first: Collection[ProgramSpec], timed: Mapping[ProgramSpec, float]
    ) -> StartEstimate | None:
        """Return the estimate for a server's programs; None if nothing was timed.

        Args:
            first: programs that are needed before the first request.
            timed: seconds of programs that were compiled.
        """
        if not timed:
            return None
        by_kind: dict[str, list[float]] = defaultdict(list)
        for spec, seconds in timed.items():
            by_kind[spec.kind].append(seconds)

        def estimate(spec: ProgramSpec) -> float:
            return timed[spec] if spec in timed else statistics.mean(by_kind.get(spec.kind) or timed.values())

        early = [estimate(spec) for spec in programs if spec in first]
        late = [estimate(spec) for spec in programs if spec not in first]
        return cls(
            num_first=len(early),
            first_s=max((sum(early) / NUM_THREADS, *early)),
            num_later=len(late),
            later_s=max((sum(late) / NUM_BACKGROUND_THREADS, *late)),
            num_timed=len(timed),
        )


@dataclass(frozen=True, slots=True)
class PlannedDeployment:
    """A server planned on some devices; all bytes are of one device.

    Attributes:
        memory: how memory is used; if it does not fit, with the requested pool, or else the smallest one that serves.
        most_blocks: the largest pool that fits; 0 if none does.
        problem: why it does not fit, and what to change; None if it fits.
        refusal: the compiler's error if it refused a program; otherwise None.
        programs: programs compiled with the pool.
        num_programs: number of programs that a server runs.
        seconds: wall-clock time of all compilations.
        geometry: sizes of a step.
        block_layers: layers of a block, which are those of a KV group.
        backend: the attention backend.
        passed_over: a line for each backend made for these devices that does not run: the reason, and the remedy.
        adapter_bytes: the part of the weights that adapter slots take.
        number_bytes: bytes of each number in a step's sums over devices (all-reduce), as compiled; None if there are
            none or nothing was compiled.
        start: estimate of a server's start; None if nothing was compiled.
        overlaps_sums: as of `Step`.
        sums: if sums overlap with products, those of each compiled forward, by its tokens.
    """

    memory: MemoryPlan
    most_blocks: int
    problem: str | None
    refusal: CompilerOutOfMemory | None
    programs: tuple[PlannedProgram, ...]
    num_programs: int
    seconds: float
    geometry: Geometry
    block_layers: int
    backend: str
    passed_over: tuple[str, ...]
    adapter_bytes: int
    number_bytes: float | None
    start: StartEstimate | None
    overlaps_sums: bool = False
    sums: Mapping[int, tuple[CompiledSum, ...]] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """Usable blocks of the whole pool; the memory plan has those of one device."""
        return self.memory.num_blocks * self.geometry.dp_size

    @property
    def fits(self) -> bool:
        return self.problem is None


def _require_loadable(config: ModelConfig, save: Path | None) -> None:
    """Raise InvalidArgument if programs are saved that no server loads."""
    if save is not None and config.num_recurrent_layers:
        what = f"{config.architecture} has recurrent state"
        raise InvalidArgument("--save", f"is {save}, but {what}, whose programs no server loads (--compiled)")


def compile_deployment(
    models: Models,
    options: EngineConfig,
    mesh: Mesh,
    hbm_bytes: int,
    *,
    all_programs: bool,
    progress: Progress,
    save: Path | None = None,
    num_threads: int | None = None,
) -> PlannedDeployment:
    """Plan the memory and compile the programs.

    Args:
        models: the model, and its draft.
        options: of the server.
        mesh: its devices need not be attached.
        hbm_bytes: memory of one device that programs may use.
        all_programs: compile every program of the server, not only the largest ones and the decode step.
        progress: reports each compilation.
        save: a folder that every program is written to, for `jpaged serve --compiled`; nothing is saved if it does not
            fit.
        num_threads: programs compiled concurrently; None for a server's default.

    Raises:
        InvalidArgument, Unsupported: the model cannot be served with these options, whatever the memory, or the
            compiler fails.
    """
    _require_loadable(models.model.config, save)
    set_up_compile_cache(None)  # compile times must be the compiler's, and a program from a cache cannot be saved
    begin, dp_size = time.perf_counter(), get_dp_size(models.model.config, mesh)

    def served(num_blocks: int) -> ServerPrograms:
        cache = dataclasses.replace(options.cache, num_blocks=num_blocks * dp_size)
        served = dataclasses.replace(options, cache=cache)
        return ServerPrograms.of(*abstract_serving(models.model, served, mesh, draft=models.draft))

    def compile_some(
        server: ServerPrograms, specs: Collection[ProgramSpec]
    ) -> tuple[Mapping[ProgramSpec, CompiledProgram], CompilerOutOfMemory | None]:
        """Return the compiled programs, and the compiler's error if it refused one for lack of memory."""
        try:
            return server.compile(specs, progress, num_threads), None
        except jax.errors.JaxRuntimeError as error:
            refusal = CompilerOutOfMemory.of(error)
            if refusal is None:
                reason = str(error).strip().splitlines()[0]
                raise Unsupported(f"compilation for these devices failed: {reason}") from error
            return {}, refusal

    request, memory = served(1).pool_request(options.cache), _memory_of_one_device(mesh, hbm_bytes)
    probe = served(request.probe_blocks(memory))
    passed_over = tuple(DeviceAttention.on(models.model, options, mesh).passed_over())
    wanted = request.num_blocks or request.blocks_per_seq
    plan = MemoryPlan(request, hbm_bytes, wanted, what=_WHAT, outside_bytes=memory.outside_bytes)

    sizes = probe.geometry
    first = list(probe.sources)
    if not waits_for_all_programs(options, mesh):
        first = least_programs(
            sizes.buckets,
            move_sizes(probe.step.layout),
            has_host_blocks=sizes.num_host_blocks > 0,
            has_adapters=sizes.max_loras > 0,
        )

    def result(
        plan: MemoryPlan,
        programs: Collection[CompiledProgram],
        problem: str | None,
        refusal: CompilerOutOfMemory | None = None,
    ) -> PlannedDeployment:
        return PlannedDeployment(
            memory=plan,
            most_blocks=dp_size * max(0, plan.most_blocks or 0),
            problem=problem,
            refusal=refusal,
            programs=tuple(
                PlannedProgram(str(program.spec), round(program.seconds, 2), ProgramReport.of(program.executable))
                for program in programs
            ),
            num_programs=len(probe.sources),
            seconds=time.perf_counter() - begin,
            geometry=probe.geometry,
            block_layers=probe.step.layout.num_layers,
            backend=probe.step.backend,
            passed_over=passed_over,
            adapter_bytes=probe.adapter_bytes,
            number_bytes=_number_bytes(programs),
            start=StartEstimate.of(list(probe.sources), first, {one.spec: one.seconds for one in programs}),
            overlaps_sums=probe.step.overlaps_sums,
            sums=_list_sums(programs) if probe.step.overlaps_sums else {},
        )

    if plan.usable_bytes is not None and request.weight_bytes >= plan.usable_bytes:
        return result(plan, (), str(too_large(plan)))  # compilation is not needed to know
    compiled, refusal = compile_some(probe, probe.decisive_specs)
    if refusal is not None:
        return result(plan, compiled.values(), refusal.problem, refusal)
    taken = probe.memory(compiled)
    plan = dataclasses.replace(plan, programs=taken)
    try:
        plan = plan_memory(request, memory, lambda: taken)
    except InvalidArgument as error:
        server = served(wanted)
        _, refusal = compile_some(server, server.decisive_specs[:1])
        return result(plan, compiled.values(), str(error), refusal)
    server = served(plan.num_blocks)
    specs = list(server.sources) if all_programs or save is not None else _decisive_specs(server)
    # Sampling programs do not depend on the pool.
    known = {spec: program for spec, program in compiled.items() if spec.kind == "sample"}
    compiled, refusal = compile_some(server, [spec for spec in specs if spec not in known])
    every = {**known, **compiled}
    compiled = {spec: every[spec] for spec in specs if spec in every}
    if refusal is not None:
        return result(plan, compiled.values(), refusal.problem, refusal)
    if save is not None:
        num_bytes = save_programs(save, CompileTarget.of(server.step, server.geometry), compiled)
        progress(f"saved {num_bytes / (1 << 20):.1f} MiB of programs to {save}", len(specs), len(specs))
    return result(dataclasses.replace(plan, programs=server.memory(compiled)), compiled.values(), None)


def _memory_of_one_device(mesh: Mesh, hbm_bytes: int) -> DeviceMemory:
    """Return the memory that programs may use; a GPU's is the default share for JAX's allocator."""
    is_gpu = first_device(mesh).platform == "gpu"
    outside_bytes = int(hbm_bytes / GPU_MEMORY_SHARE) - hbm_bytes if is_gpu else None
    return DeviceMemory(hbm_bytes, what=_WHAT, outside_bytes=outside_bytes)


def _list_sums(programs: Collection[CompiledProgram]) -> dict[int, tuple[CompiledSum, ...]]:
    forwards = [program for program in programs if program.spec.kind == "forward"]
    return {program.spec.size: CompiledSum.from_collectives(collectives(program.executable)) for program in forwards}


def _number_bytes(programs: Collection[CompiledProgram]) -> float | None:
    """Return the average bytes of a number in the all-reduces of the largest step; types may differ."""
    forwards = [program for program in programs if program.spec.kind == "forward"]
    largest = max(forwards, key=lambda program: program.spec.size, default=None)
    num_bytes = num_numbers = 0
    for one in [] if largest is None else collectives(largest.executable):
        if one.opcode == "all-reduce":
            turns = math.prod(trips or 1 for trips in one.loop_trips)
            num_bytes += turns * one.num_bytes
            num_numbers += turns * sum(math.prod(dims) for dims in one.dims)
    return num_bytes / num_numbers if num_numbers else None


def _decisive_specs(server: ServerPrograms) -> list[ProgramSpec]:
    """Return the decisive programs, and the step that decodes the maximum number of rows."""
    decode = ProgramSpec("forward", server.geometry.buckets.num_tokens(server.geometry.max_num_seqs))
    return [spec for spec in server.sources if spec in (decode, *server.decisive_specs)]
