"""What the host spends on a step: deciding it, packing it, telling its tokens. No device: the executor does nothing.

    schedule   who runs, and which blocks they get (Scheduler and PagedKVCacheManager)
    pack       the schedule as padded arrays (build_step_inputs, build_sampling_inputs)
    publish    tokens to stop rules and events, and the step's counts
    step       all of it, as Engine.step does it
    whole      the same where nobody reads along: one event when a request ends

Every running sequence decodes: the most rows that a step can have. Time should grow with the rows and not with the
pool. CPU time of the thread, so that other processes of the machine do not count: medians over steps, the minimum of
several runs.

    python -m benchmarks.host_step [--rows 16 64 256] [--blocks 1000 10000 100000]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np

from benchmarks.record import machine, save
from jpaged.config import EngineConfig, SchedulerOptions
from jpaged.engine.engine import Engine
from jpaged.engine.executor import (
    I32,
    BlockMoves,
    BucketTable,
    DeviceRates,
    Geometry,
    Progress,
    SamplingInputs,
    StepInputs,
    StepOutputs,
)
from jpaged.engine.executor.aux_io import AuxInputs, AuxOutputs
from jpaged.engine.kv_cache.paged import PagedKVCacheManager
from jpaged.engine.output.processor import OutputProcessor
from jpaged.engine.scheduler.output import build_sampling_inputs, build_step_inputs
from jpaged.engine.scheduler.scheduler import Scheduler, SchedulingPolicy
from jpaged.engine.sequence import SequenceGroup
from jpaged.engine.stats import StepStats
from jpaged.engine.tokenizer import NoTokenizer
from jpaged.types import Adapter, OutputEvent, Request, SamplingParams

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
VOCAB_SIZE = 32000
PROMPT_LEN = 16
NUM_STEPS = 31  # of one run: three blocks a sequence, so that 256 of them fit into the smallest pool
NUM_RUNS = 5
LIMIT_MS = 1.0
PARTS = ("schedule", "pack", "publish", "step", "whole")


@dataclass(frozen=True, slots=True)
class HostCost:
    """Milliseconds of one step's parts."""

    num_rows: int
    num_blocks: int
    schedule_ms: float
    pack_ms: float
    publish_ms: float
    step_ms: float
    whole_ms: float


class NullExecutor:
    """Implements `jpaged.engine.executor.Executor` by doing nothing: every row samples token 1."""

    host_blocks = None

    def __init__(self, num_rows: int, num_blocks: int) -> None:
        self._geometry = Geometry(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=num_rows,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            bytes_per_block=1,
            buckets=BucketTable.build(max_num_batched_tokens=num_rows * PROMPT_LEN, max_num_seqs=num_rows),
        )
        sampled = np.ones((num_rows, 1), np.int32)
        self._outputs = StepOutputs(sampled, np.ones((num_rows, 1), np.bool_))

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def rates(self) -> DeviceRates:
        return DeviceRates(1.0, 1.0, ((1, 1.0),))

    @property
    def num_compiles_after_warm_up(self) -> int:
        return 0

    def warm_up(self, progress: Progress) -> None:
        progress("programs", 0, 0)

    def move_blocks(self, moves: BlockMoves) -> None:
        pass

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        pass

    def forward(self, inputs: StepInputs) -> None:
        pass

    def sample(self, hidden: None, inputs: SamplingInputs) -> StepOutputs:
        return self._outputs

    def decode(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> StepOutputs:
        return self._outputs

    def compute_aux(self, hidden: None, inputs: AuxInputs) -> Callable[[], AuxOutputs]:
        return AuxOutputs

    def is_done(self, handle: StepOutputs) -> bool:
        return True

    def collect(self, handle: StepOutputs) -> StepOutputs:
        return handle

    def shutdown(self) -> None:
        pass


class Loop:
    """The engine's loop with a stopwatch between its parts; the plain loop, without overlap."""

    def __init__(self, executor: NullExecutor) -> None:
        self._executor = executor
        geometry = executor.geometry
        self._memory = PagedKVCacheManager(geometry)
        options = SchedulerOptions(preemption_mode="recompute")
        self._scheduler = Scheduler(self._memory, SchedulingPolicy(), options, geometry, executor.rates)
        self._output = OutputProcessor(NoTokenizer(VOCAB_SIZE), frozenset())
        self._stats = StepStats(geometry, time.monotonic)
        for request in _requests(geometry.max_num_seqs):
            group = SequenceGroup(request, len(request.request_id), 0.0, _ignore, geometry.max_blocks_per_seq)
            self._output.open(group)
            self._scheduler.queues.add(group)

    def step(self) -> tuple[float, float, float]:
        """Runs one step; the seconds of its parts."""
        begin = time.thread_time()
        schedule = self._scheduler.schedule()
        decided = time.thread_time()
        geometry = self._executor.geometry
        inputs = build_step_inputs(schedule, geometry)
        sampling = build_sampling_inputs(schedule, geometry, frozenset(), self._scheduler.rows.logits_processors)
        packed = time.thread_time()
        self._executor.forward(inputs)
        outputs = self._executor.collect(self._executor.sample(None, sampling))
        self._stats.count_schedule(schedule)
        self._stats.count_steps(schedule)
        tokens, _ = schedule.live_tokens()
        self._stats.count_tokens(tokens.groups, packed)
        for _ in self._output.publish(tokens, outputs):
            """Nobody ends."""
        self._stats.end_step(self._memory, self._scheduler)
        return decided - begin, packed - decided, time.thread_time() - packed


def measure(num_rows: int, num_blocks: int) -> HostCost:
    """The cost of a decoding step of so many rows over such a pool."""
    runs = [_time_parts(NullExecutor(num_rows, num_blocks)) for _ in range(NUM_RUNS)]
    step_ms, whole_ms = (
        min(_time_engine(NullExecutor(num_rows, num_blocks), is_whole=is_whole) for _ in range(NUM_RUNS))
        for is_whole in (False, True)
    )
    schedule_ms, pack_ms, publish_ms = (min(run[part] for run in runs) for part in range(3))
    return HostCost(num_rows, num_blocks, schedule_ms, pack_ms, publish_ms, step_ms, whole_ms)


def _time_parts(executor: NullExecutor) -> list[float]:
    loop = Loop(executor)
    samples = _undisturbed(loop.step)
    return [1e3 * statistics.median(part) for part in zip(*samples, strict=True)]


def _time_engine(executor: NullExecutor, *, is_whole: bool) -> float:
    geometry = executor.geometry
    engine = Engine(executor, NoTokenizer(VOCAB_SIZE), EngineConfig())
    for request in _requests(geometry.max_num_seqs):
        engine.submit(replace(request, is_non_streaming=is_whole), _ignore)

    def step() -> float:
        begin = time.thread_time()
        engine.step()
        return time.thread_time() - begin

    return 1e3 * statistics.median(_undisturbed(step))


def _undisturbed(step: Callable[[], object]) -> list:
    """What each step of a run returns; the first two admit and prefill, and are left out."""
    gc.collect()
    gc.disable()
    try:
        return [step() for _ in range(NUM_STEPS)][2:]
    finally:
        gc.enable()


def _requests(count: int) -> list[Request]:
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_MODEL_LEN - PROMPT_LEN, ignore_eos=True)
    return [Request(f"r{i}", tuple(range(i, i + PROMPT_LEN)), sampling) for i in range(count)]


def _ignore(event: OutputEvent) -> None:
    """Nobody listens."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_step",
        description="What the host spends on a step: deciding it, packing it, telling its tokens.",
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    options = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(f"{'rows':>5} {'blocks':>7} " + " ".join(f"{part + ' ms':>12}" for part in PARTS) + "   schedule us/row")
    costs = []
    for num_rows in options.rows:
        for num_blocks in options.blocks:
            cost = measure(num_rows, num_blocks)
            costs.append(cost)
            values = (cost.schedule_ms, cost.pack_ms, cost.publish_ms, cost.step_ms, cost.whole_ms)
            per_row_us = 1e3 * cost.schedule_ms / num_rows
            print(f"{num_rows:>5} {num_blocks:>7} " + " ".join(f"{v:>12.3f}" for v in values) + f" {per_row_us:>12.2f}")
    slowest = max(costs, key=lambda cost: cost.step_ms)
    print(f"a step takes at most {slowest.step_ms:.3f} ms; the limit is {LIMIT_MS} ms")
    command = "python -m benchmarks.host_step"
    path = save("host_step", command, {"limit_step_ms": LIMIT_MS, "costs": [asdict(cost) for cost in costs]})
    print(f"written to {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    main()
