"""The programs of a server with a pool of a given size: how each is made, and the memory that all of them take.

Memory of weights and pool is not included. The largest program of each kind decides: working memory grows with tokens,
rows and blocks. If only those are compiled, the code of the others is assumed to be as large as theirs. A margin of an
eighth and 16 MiB covers the error: in a small model, a smaller program may take some MiB more than the largest.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from jpaged.config import CacheOptions, platform_default
from jpaged.device.host_pool import MAX_ON_THE_WAY
from jpaged.device.mesh import first_device, local_bytes
from jpaged.device.programs.compile import TELLS, ProgramSpec
from jpaged.device.programs.kept import KeptPrograms
from jpaged.device.programs.lowering import program_lowerings
from jpaged.device.programs.memory_plan import PoolRequest, ProgramMemory
from jpaged.device.programs.report import ProgramReport
from jpaged.device.programs.saved import SavedPrograms
from jpaged.device.programs.store import NUM_THREADS, CompiledProgram, ProgramSource, ProgramStore
from jpaged.device.speculation.draft import own_params, pool_bytes_per_block
from jpaged.device.step.forward import Step, forward_packing
from jpaged.device.step.runner import EDIT_WORDS, ROW_WORDS
from jpaged.device.step.told import MOST_BYTES
from jpaged.device.transfers import content_bytes
from jpaged.engine.executor import Geometry, Progress
from jpaged.engine.executor.rows import NUM_SINGLES, num_mask_words
from jpaged.engine.executor.steps import Tell
from jpaged.models.layers import Params

_MARGIN, _MARGIN_BYTES = 8, 16 << 20  # divisor, and bytes, for programs that are not compiled yet
_OVERLAPPED = 2  # steps: one runs while the next one's inputs are made


@dataclass(frozen=True, slots=True)
class ServerPrograms:
    """The closed list of a server's programs.

    Attributes:
        step: the step whose programs they are.
        geometry: their sizes.
        sources: how each is made, most needed first.
        weight_bytes: of the parameters of one device.
    """

    step: Step
    geometry: Geometry
    sources: Mapping[ProgramSpec, ProgramSource]
    weight_bytes: int

    @classmethod
    def of(
        cls,
        step: Step,
        geometry: Geometry,
        params: Params,
        saved: SavedPrograms | None = None,
        keep: Path | None = None,
    ) -> ServerPrograms:
        """Return the programs of a step, each loaded if it was saved and compiled otherwise, on demand.

        Args:
            params: may be shapes.
            saved: programs that were compiled elsewhere.
            keep: a folder that caches programs compiled here for the next start; None caches none.
        """
        kept = None if keep is None else KeptPrograms.of(keep, step, geometry, params)
        sources = {}
        for spec, lowering in program_lowerings(step, params, geometry).items():
            if saved is not None and saved.has(spec):
                sources[spec] = ProgramSource(functools.partial(saved.load, spec, step.mesh), is_saved=True)
            elif kept is not None:
                sources[spec] = ProgramSource(functools.partial(kept.make, spec, lowering))
            else:
                sources[spec] = ProgramSource.of(lowering)
        return cls(step, geometry, sources, local_bytes(own_params(step, params)))

    @property
    def decisive_specs(self) -> list[ProgramSpec]:
        """The largest program of each kind, in the order of the list; all programs of auxiliary outputs.

        Of `sample` it is the one with top log-probabilities; of `decode` none, which is a forward and a sample of no
        more tokens and rows.
        """
        return _decisive(self.sources)

    @property
    def adapter_bytes(self) -> int:
        """The part of weight_bytes that adapter slots take."""
        step = self.step
        if step.slots is None:
            return 0
        by_place = step.slots.shapes(step.model, step.layer_mode, step.mesh, has_slots=True)
        return local_bytes({"slots": list(by_place.values())})

    def compile(
        self,
        specs: Collection[ProgramSpec],
        progress: Progress = lambda what, done, total: None,
        num_threads: int | None = None,
    ) -> Mapping[ProgramSpec, CompiledProgram]:
        """Compile programs for inspection, without running them. The first failure ends it."""
        store = ProgramStore({spec: self.sources[spec] for spec in specs}, num_threads=num_threads or NUM_THREADS)
        store.compile(store.specs, progress)
        store.close()
        return store.ready

    def pool_request(self, cache: CacheOptions) -> PoolRequest:
        """Return the facts that decide how many blocks the pool has."""
        return PoolRequest(
            bytes_per_block=pool_bytes_per_block(self.step),
            blocks_per_seq=self.geometry.num_blocks_of_longest,
            max_num_seqs=self.geometry.max_num_seqs,
            max_model_len=self.geometry.max_model_len,
            memory_utilization=cache.memory_utilization
            or platform_default("memory_utilization", first_device(self.step.mesh).platform),
            weight_bytes=self.weight_bytes,
            num_blocks=cache.num_blocks,
            pool_bytes=None if cache.num_blocks is not None else cache.kv_cache_memory_bytes,
            has_default_share=cache.memory_utilization is None,
        )

    def memory(self, compiled: Mapping[ProgramSpec, CompiledProgram]) -> ProgramMemory:
        """Return the memory of all programs on one device; `compiled` has at least the decisive ones."""
        reports = {spec: ProgramReport.of(program.executable) for spec, program in compiled.items()}
        of_kind: dict[str, ProgramReport] = {spec.kind: reports[spec] for spec in _decisive(reports)}
        temps = {spec.kind: 0 for spec in reports}
        for spec, report in reports.items():
            temps[spec.kind] = max(temps[spec.kind], report.temp_bytes)
        # A step's forward, and whatever the device runs next to it: its sample, or the moves of the next step.
        # The next step's moves may also run next to a multi-step decode or to rounds of a draft model.
        several_bytes = max(temps.pop("decode", 0), temps.pop("speculate", 0))
        temp_bytes = max(temps.pop("forward"), several_bytes) + max(temps.values(), default=0)
        largest = of_kind["forward"]
        code_bytes = sum((reports.get(spec) or of_kind.get(spec.kind, largest)).code_bytes for spec in self.sources)
        if len(reports) < len(self.sources):
            temp_bytes += temp_bytes // _MARGIN + _MARGIN_BYTES
            code_bytes += code_bytes // _MARGIN
        return ProgramMemory(temp_bytes, self._kept_bytes(of_kind) + self._told_bytes(reports), code_bytes)

    def _kept_bytes(self, of_kind: Mapping[str, ProgramReport]) -> int:
        buckets, layout = self.geometry.buckets, self.step.layout
        results = {kind: report.output_bytes - report.alias_bytes for kind, report in of_kind.items()}
        outputs = results["forward"] + max(results["sample"], results["edited"], results.get("speculate", 0))
        words = forward_packing(buckets.tokens[-1], self.geometry).size + buckets.rows[-1] * ROW_WORDS
        # several in flight to the host, one being read from the pool, one from the host
        moving = (MAX_ON_THE_WAY + 2) * content_bytes(layout) * layout.local.bytes_per_block // layout.bytes_per_block
        last_tokens = 4 * self.step.num_places
        loading = of_kind.get("load_adapter")
        if loading is not None:  # one adapter in flight to its slot
            moving += loading.argument_bytes - loading.alias_bytes
        return _OVERLAPPED * (outputs + 4 * words + last_tokens) + moving + self._edit_bytes(of_kind)

    def _edit_bytes(self, of_kind: Mapping[str, ProgramReport]) -> int:
        """Return the bytes of token counts, the logits processors of two steps, and their neutral values for each size.

        The words of logits processors accompany each step: records, token biases and masks.
        """
        sizes = [spec.size for spec in self.sources if spec.kind == "edited"]
        row_words = EDIT_WORDS + 3 * NUM_SINGLES + num_mask_words(self.step.vocab_size)
        return of_kind["count"].alias_bytes + 4 * row_words * (sum(sizes) + _OVERLAPPED * max(sizes))

    def _told_bytes(self, reports: Mapping[ProgramSpec, ProgramReport]) -> int:
        """Return the bytes that log-probabilities and hidden states of two steps take on the device, up to a limit.

        It assumes that every hidden state is requested.
        """
        num_hidden = self.step.num_places + self.step.num_told
        tells = [(spec.size, reports[spec].output_bytes) for spec in TELLS.values()]
        largest = max(-(-num_hidden // size) * num_bytes for size, num_bytes in tells)
        return min(_OVERLAPPED * largest, max(MOST_BYTES, *(num_bytes for _, num_bytes in tells)))


def _decisive(specs: Collection[ProgramSpec]) -> list[ProgramSpec]:
    largest: dict[tuple[str, Tell], ProgramSpec] = {}
    for spec in specs:
        if spec.kind == "decode":
            continue
        best = largest.setdefault((spec.kind, spec.tell), spec)
        if (spec.size, spec.detail) > (best.size, best.detail):
            largest[spec.kind, spec.tell] = spec
    return [spec for spec in specs if largest.get((spec.kind, spec.tell)) == spec]
