"""A server on devices that are not there: its memory planned, its programs compiled, and nothing run.

    hungriest programs, a pool of a GiB -> what programs take -> the number of blocks -> the programs of that pool

It never fails for want of memory: what does not fit is a result, with the compiler's own words where it has spoken.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from jpaged.config import EngineConfig
from jpaged.device.aot.hlo import collectives
from jpaged.device.programs.compile import ProgramSpec, set_up_compile_cache
from jpaged.device.programs.compiler_errors import CompilerOutOfMemory
from jpaged.device.programs.lowering import abstract_serving
from jpaged.device.programs.memory_plan import DeviceMemory, MemoryPlan, plan_memory, too_large
from jpaged.device.programs.report import ProgramReport
from jpaged.device.programs.saved import Target, save_programs
from jpaged.device.programs.server_programs import ServerPrograms
from jpaged.device.programs.store import CompiledProgram
from jpaged.device.step_sizes import Attention
from jpaged.engine.executor import Geometry, Progress
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.model import Model

_WHAT = "what programs may use of a device of this kind"


@dataclass(frozen=True, slots=True)
class Models:
    """A model as published, and the one that proposes tokens for it, where the options ask for one."""

    model: Model
    draft: Model | None = None


@dataclass(frozen=True, slots=True)
class PlannedProgram:
    """A program that was compiled: its name, the seconds that it took, and what the compiler says of its memory."""

    name: str
    seconds: float
    report: ProgramReport


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a server would be on some devices; all bytes are of one of them.

    Attributes:
        memory: where each byte goes; of what does not fit, with the pool that was asked for, or the least that serves.
        most_blocks: the largest pool that fits; 0 where none does.
        problem: why it does not fit, and what to change; None where it fits.
        refusal: what the compiler said where it refused a program; else None.
        programs: that were compiled with the pool.
        num_programs: that a server runs.
        seconds: for all that was compiled, by the clock.
        geometry: sizes of its steps.
        block_layers: layers of a block, which are those of a KV group.
        backend: whose attention kernel runs.
        passed_over: lines on backends made for the devices that do not run: why, and what would bring them back.
        adapter_bytes: of the weights, what adapters in their slots take.
        number_bytes: of each number that devices add up in a step, as the compiled program exchanges them; None where
            they exchange none, or nothing was compiled.
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

    @property
    def fits(self) -> bool:
        return self.problem is None


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
) -> Deployment:
    """Plans the memory and compiles.

    Args:
        models: the model, and its draft.
        options: of the server.
        mesh: of devices that need not be there.
        hbm_bytes: that programs may use of one of them.
        all_programs: compiles every program of the server, not only the hungriest and the one that decodes.
        progress: told what is compiled.
        save: a folder that every program is written to, for `jpaged serve --compiled`; nothing that does not fit is.
        num_threads: programs that are compiled at a time; None is as a server does.

    Raises:
        InvalidArgument, Unsupported: the model cannot be served so, whatever the memory, or the compiler fails.
    """
    set_up_compile_cache(None)  # seconds are the compiler's, and what comes from a cache cannot be saved
    begin = time.perf_counter()

    def served(num_blocks: int) -> ServerPrograms:
        cache = dataclasses.replace(options.cache, num_blocks=num_blocks)
        served = dataclasses.replace(options, cache=cache)
        return ServerPrograms.of(*abstract_serving(models.model, served, mesh, draft=models.draft))

    def compile_some(
        server: ServerPrograms, specs: Collection[ProgramSpec]
    ) -> tuple[Mapping[ProgramSpec, CompiledProgram], CompilerOutOfMemory | None]:
        """The programs that were compiled, and the compiler's word if it refused one for want of memory."""
        try:
            return server.compile(specs, progress, num_threads), None
        except jax.errors.JaxRuntimeError as error:
            refusal = CompilerOutOfMemory.of(error)
            if refusal is None:
                reason = str(error).strip().splitlines()[0]
                raise Unsupported(f"the compiler fails for these devices: {reason}") from error
            return {}, refusal

    request, memory = served(1).pool_request(options.cache), DeviceMemory(hbm_bytes, what=_WHAT)
    probe = served(request.probe_blocks(memory))
    passed_over = tuple(Attention.on(models.model, options, mesh).passed_over())
    wanted = request.num_blocks or request.blocks_per_seq
    plan = MemoryPlan(request, hbm_bytes, wanted, what=_WHAT)

    def result(
        plan: MemoryPlan,
        programs: Collection[CompiledProgram],
        problem: str | None,
        refusal: CompilerOutOfMemory | None = None,
    ) -> Deployment:
        return Deployment(
            memory=plan,
            most_blocks=max(0, plan.most_blocks or 0),
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
        )

    if plan.usable_bytes is not None and request.weight_bytes >= plan.usable_bytes:
        return result(plan, (), str(too_large(plan)))  # nothing need be compiled to say so
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
    specs = list(server.sources) if all_programs or save is not None else _telling_specs(server)
    # What samples knows nothing of the pool.
    known = {spec: program for spec, program in compiled.items() if spec.kind == "sample"}
    compiled, refusal = compile_some(server, [spec for spec in specs if spec not in known])
    every = {**known, **compiled}
    compiled = {spec: every[spec] for spec in specs if spec in every}
    if refusal is not None:
        return result(plan, compiled.values(), refusal.problem, refusal)
    if save is not None:
        num_bytes = save_programs(save, Target.of(server.step, server.geometry), compiled)
        progress(f"saved {num_bytes / (1 << 20):.1f} MiB of programs in {save}", len(specs), len(specs))
    return result(dataclasses.replace(plan, programs=server.memory(compiled)), compiled.values(), None)


def _number_bytes(programs: Collection[CompiledProgram]) -> float | None:
    """The bytes of a number in the largest step's sums over devices, on average: not all need be of one type."""
    forwards = [program for program in programs if program.spec.kind == "forward"]
    largest = max(forwards, key=lambda program: program.spec.size, default=None)
    num_bytes = num_numbers = 0
    for one in [] if largest is None else collectives(largest.executable):
        if one.opcode == "all-reduce":
            turns = math.prod(trips or 1 for trips in one.loop_trips)
            num_bytes += turns * one.num_bytes
            num_numbers += turns * sum(math.prod(dims) for dims in one.dims)
    return num_bytes / num_numbers if num_numbers else None


def _telling_specs(server: ServerPrograms) -> list[ProgramSpec]:
    """The decisive programs, and the step that decodes as many rows as there may be."""
    decode = ProgramSpec("forward", server.geometry.buckets.num_tokens(server.geometry.max_num_seqs))
    return [spec for spec in server.sources if spec in (decode, *server.decisive_specs)]
