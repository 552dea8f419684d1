"""What compiled programs take of a device besides weights and pool: their reports, added up for the memory plan.

The largest program of each kind decides: working memory grows with tokens, rows and blocks. Where only those are
compiled, the code of the others is taken to be as large as theirs, and an eighth and 16 MiB are added for what that
misses: of a small model, a smaller program may take some MiB more than the largest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import jax

from jpaged.device.host_pool import MAX_ON_THE_WAY
from jpaged.device.programs.compile import ProgramSpec
from jpaged.device.programs.compiler_errors import memory_refusals
from jpaged.device.programs.memory_plan import ProgramMemory
from jpaged.device.programs.report import ProgramReport
from jpaged.device.programs.store import ProgramSource, ProgramStore
from jpaged.device.step.forward import Step, forward_packing, sample_packing
from jpaged.device.transfers import content_bytes
from jpaged.engine.executor import Geometry

_MARGIN, _MARGIN_BYTES = 8, 16 << 20  # a part of so many, and bytes, for programs that are not compiled yet
_OVERLAPPED = 2  # steps: one runs while the next one's inputs are made


def decisive_specs(specs: Collection[ProgramSpec]) -> list[ProgramSpec]:
    """The largest program of each kind, of `sample` the one with alternatives; in the order of `specs`."""
    largest: dict[str, ProgramSpec] = {}
    for spec in specs:
        best = largest.setdefault(spec.kind, spec)
        if (spec.size, spec.want_top_logprobs) > (best.size, best.want_top_logprobs):
            largest[spec.kind] = spec
    return [spec for spec in specs if largest[spec.kind] == spec]


def program_memory(
    reports: Mapping[ProgramSpec, ProgramReport], specs: Collection[ProgramSpec], step: Step, geometry: Geometry
) -> ProgramMemory:
    """What all programs of a server take of one device.

    Args:
        reports: of those that are compiled: at least the decisive ones.
        specs: of all.
        step: whose programs they are.
        geometry: their sizes.
    """
    decisive = decisive_specs(list(reports))
    of_kind: dict[str, ProgramReport] = {spec.kind: reports[spec] for spec in decisive}
    temps = dict.fromkeys(of_kind, 0)
    for spec, report in reports.items():
        temps[spec.kind] = max(temps[spec.kind], report.temp_bytes)
    # A step's forward and whatever the device runs next to it: its sample, or the moves of the step after.
    temp_bytes = temps.pop("forward") + max(temps.values(), default=0)
    code_bytes = sum((reports.get(spec) or of_kind[spec.kind]).code_bytes for spec in specs)
    if len(reports) < len(specs):
        temp_bytes += temp_bytes // _MARGIN + _MARGIN_BYTES
        code_bytes += code_bytes // _MARGIN
    return ProgramMemory(temp_bytes, _kept_bytes(of_kind, step, geometry), code_bytes)


def decisive_memory(sources: Mapping[ProgramSpec, ProgramSource], step: Step, geometry: Geometry) -> ProgramMemory:
    """`program_memory` before a server's programs are compiled: it makes the decisive ones.

    Raises:
        InvalidArgument: the compiler says that one of them does not fit.
    """
    store = ProgramStore(sources)
    with memory_refusals():
        store.compile(decisive_specs(store.specs), _silent)
    reports = {spec: report_of(program.executable) for spec, program in store.ready.items()}
    store.release()
    return program_memory(reports, store.specs, step, geometry)


def report_of(executable: jax.stages.Compiled) -> ProgramReport:
    """The compiler's account; of a backend that gives none, nothing is known and nothing is counted."""
    if executable.memory_analysis() is None:
        return ProgramReport(0, 0, 0, 0, 0)
    return ProgramReport.of(executable)


def _silent(what: str, done: int, total: int) -> None:
    """Reports nothing."""


def _kept_bytes(of_kind: Mapping[str, ProgramReport], step: Step, geometry: Geometry) -> int:
    buckets, layout = geometry.buckets, step.attention.layout
    outputs = sum(of_kind[kind].output_bytes - of_kind[kind].alias_bytes for kind in ("forward", "sample"))
    words = forward_packing(buckets.tokens[-1], geometry).size + sample_packing(buckets.rows[-1]).size
    # Some on their way to the host, one being read from the pool, one from the host.
    moving = (MAX_ON_THE_WAY + 2) * (content_bytes(layout) // layout.num_shards)
    last_tokens = 4 * step.num_places
    return _OVERLAPPED * (outputs + 4 * words + last_tokens) + moving
