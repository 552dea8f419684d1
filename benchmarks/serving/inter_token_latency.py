"""How long streams wait for their next token while long prompts arrive, with and without a bound.

Some streams decode on the demo at any time; prompts of nearly max_model_len tokens arrive as a Poisson process, and
generate a few tokens. A gap is the time between two tokens of a stream. Each seed is run with every bound in turn, from
an empty cache, on one executor, and begins with what the device was timed at when it started.

    taskset -c 1 python -m benchmarks.serving.inter_token_latency [--bounds 0 0.02 0.05] [--rate 3] [--seeds 0 1 2]

By default the clock is the process's time, so that other processes of the machine do not count: right where it is
pinned to one core and always has something to do, as here. `--clock wall` is the wall's.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.record import machine, save
from jpaged.build import build
from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.engine.executor import Executor
from jpaged.engine.tokenizer import NoTokenizer
from jpaged.types import OutputEvent, Request, SamplingParams

STREAM_PROMPT, OUTPUT = 16, 8
"""Tokens of a stream's prompt; tokens that follow a long prompt."""
WARM_SHARE = 0.1
"""The share of a run before which gaps do not count: streams begin, and what was timed is corrected."""
CLOCKS: dict[str, Callable[[], float]] = {"process": time.process_time, "wall": time.perf_counter}


@dataclass(frozen=True, slots=True)
class Result:
    """One run.

    Attributes:
        bound_ms: 0 is none.
        ttft_*_ms: arrival of a long prompt to its first token.
        tokens_per_s: of the streams.
        prompt_tokens_per_s: of the long prompts that got their first token.
    """

    seed: int
    bound_ms: float
    num_gaps: int
    itl_p50_ms: float
    itl_p90_ms: float
    itl_p99_ms: float
    itl_max_ms: float
    share_above_bound: float
    num_prompts: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    tokens_per_s: float
    prompt_tokens_per_s: float


@dataclass
class Run:
    """One engine, stepped by hand, and what came of it when.

    Attributes:
        gaps_s: between two tokens of a stream.
        first_s: arrival to first token of each long prompt.
    """

    engine: Engine
    clock: Callable[[], float]
    rng: np.random.Generator
    count_from_s: float
    gaps_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    num_requests: int = 0

    def submit(self, num_tokens: int, max_tokens: int, sink: Callable[[OutputEvent], None]) -> None:
        """Asks for tokens after so many at random."""
        self.num_requests += 1
        ids = self.rng.integers(3, self.engine.geometry.vocab_size, num_tokens).tolist()
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.engine.submit(Request(str(self.num_requests), tuple(ids), sampling), sink)

    def stream(self) -> None:
        """Begins a stream; the next one begins when it ends."""
        last_s = None

        def take(event: OutputEvent) -> None:
            nonlocal last_s
            now = self.clock()
            if last_s is not None and last_s > self.count_from_s:
                self.gaps_s.append(now - last_s)
            last_s = now
            if event.is_last:
                self.stream()

        self.submit(STREAM_PROMPT, self.engine.geometry.max_model_len - STREAM_PROMPT, take)

    def prompt(self, arrival_s: float) -> None:
        """Sends a long prompt that should have come then."""
        is_first = True

        def take(event: OutputEvent) -> None:
            nonlocal is_first
            if is_first and arrival_s > self.count_from_s:
                self.first_s.append(self.clock() - arrival_s)
            is_first = False

        self.submit(self.engine.geometry.max_model_len - OUTPUT, OUTPUT, take)


def measure(
    engine: Engine, clock: Callable[[], float], bound_s: float, seed: int, arguments: argparse.Namespace
) -> Result:
    """Runs streams and prompts for a time."""
    rng = np.random.default_rng(seed)
    begin_s = clock()
    waits_s: NDArray[np.float64] = rng.exponential(1 / arguments.rate, int(4 * arguments.rate * arguments.seconds) + 16)
    count_from_s = begin_s + WARM_SHARE * arguments.seconds
    run = Run(engine, clock, rng, count_from_s)
    arrivals_s = deque((begin_s + np.cumsum(waits_s)).tolist())
    for _ in range(arguments.streams):
        run.stream()
    while (now := clock()) < begin_s + arguments.seconds:
        while arrivals_s[0] <= now:
            run.prompt(arrivals_s.popleft())
        engine.step()
    engine.check()
    gaps_ms, first_ms = 1e3 * np.array(run.gaps_s), 1e3 * np.array(run.first_s)
    seconds = arguments.seconds * (1 - WARM_SHARE)
    return Result(
        seed=seed,
        bound_ms=bound_s * 1e3,
        num_gaps=len(gaps_ms),
        itl_p50_ms=float(np.percentile(gaps_ms, 50)),
        itl_p90_ms=float(np.percentile(gaps_ms, 90)),
        itl_p99_ms=float(np.percentile(gaps_ms, 99)),
        itl_max_ms=float(gaps_ms.max()),
        share_above_bound=float(np.mean(gaps_ms > bound_s * 1e3)) if bound_s else 0.0,
        num_prompts=len(first_ms),
        ttft_p50_ms=float(np.percentile(first_ms, 50)),
        ttft_p99_ms=float(np.percentile(first_ms, 99)),
        tokens_per_s=len(gaps_ms) / seconds,
        prompt_tokens_per_s=len(first_ms) * (engine.geometry.max_model_len - OUTPUT) / seconds,
    )


def main() -> None:
    arguments = _arguments()
    loaded = build(EngineConfig.load({"model": arguments.model, "wait_for_all_programs": True, "swap_space": 0.0}))
    assert isinstance(loaded.engine, Engine)
    executor: Executor[object, object] = loaded.engine._executor
    clock = CLOCKS[arguments.clock]
    results = []
    for seed in arguments.seeds:
        for bound_s in arguments.bounds:
            config = loaded.config.replace(max_inter_token_latency=bound_s)
            tokenizer = NoTokenizer(executor.geometry.vocab_size)
            engine = Engine(executor, tokenizer, config, clock=clock)
            results.append(measure(engine, clock, bound_s, seed, arguments))
            print(results[-1], flush=True)
    executor.shutdown()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    Console(width=120).print(_table(results, arguments.bounds))
    names = ("streams", "rate", "seconds", "clock")
    command = "python -m benchmarks.serving.inter_token_latency"
    for name in ("bounds", "seeds"):
        command += f" --{name} {' '.join(format(value, 'g') for value in getattr(arguments, name))}"
    for name in names:
        command += f" --{name} {getattr(arguments, name)}"
    record = {
        "model": arguments.model,
        "num_cores": len(os.sched_getaffinity(0)),
        "max_model_len": loaded.config.model.max_model_len,
        "max_num_batched_tokens": loaded.config.scheduler.max_num_batched_tokens,
        "forward_ms": [[size, 1e3 * seconds] for size, seconds in executor.rates.forward_s],
        "ns_per_pair": 1e9 * executor.rates.pair_s,
        "runs": [asdict(result) for result in results],
    }
    print(save("inter_token_latency", command, record))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.inter_token_latency",
        description="How long streams wait for their next token while long prompts arrive, with and without a bound.",
    )
    parser.add_argument("--model", default="demo", help="(default: demo)")
    parser.add_argument(
        "--bounds",
        type=float,
        nargs="+",
        default=[0.0, 0.02, 0.05],
        metavar="S",
        help="0 is none (default: 0 0.02 0.05)",
    )
    parser.add_argument("--streams", type=int, default=8, metavar="N", help="that decode at a time (default: 8)")
    parser.add_argument("--rate", type=float, default=3.0, metavar="R", help="long prompts a second (default: 3)")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of a run (default: 20)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="(default: 0 1 2)")
    parser.add_argument("--clock", choices=CLOCKS, default="process", help="(default: process)")
    arguments = parser.parse_args()
    for name in ("streams", "rate", "seconds"):
        if getattr(arguments, name) <= 0:
            parser.error(f"--{name} {getattr(arguments, name)} is not above 0")
    if min(arguments.bounds) < 0:
        parser.error(f"--bounds {min(arguments.bounds)} is below 0")
    return arguments


def _table(results: list[Result], bounds: list[float]) -> Table:
    """A row a bound: the median over the seeds, and of the longest gap the longest."""
    table = Table(title="medians over seeds; max is the longest of all", title_justify="left")
    for head in (
        "bound",
        "ITL p50",
        "p90",
        "p99",
        "max",
        "above",
        "prompt TTFT p50",
        "p99",
        "tokens/s",
        "prompt tokens/s",
    ):
        table.add_column(head, justify="right")
    for bound_s in bounds:
        runs = [result for result in results if result.bound_ms == bound_s * 1e3]

        def median(name: str, runs: list[Result] = runs) -> float:
            return float(np.median([getattr(run, name) for run in runs]))

        table.add_row(
            f"{bound_s * 1e3:g} ms" if bound_s else "none",
            *(f"{median(f'itl_{name}_ms'):.1f} ms" for name in ("p50", "p90", "p99")),
            f"{max(run.itl_max_ms for run in runs):.1f} ms",
            f"{median('share_above_bound'):.2%}" if bound_s else "-",
            *(f"{median(f'ttft_{name}_ms'):.0f} ms" for name in ("p50", "p99")),
            f"{median('tokens_per_s'):.0f}",
            f"{median('prompt_tokens_per_s'):.0f}",
        )
    return table


if __name__ == "__main__":
    main()
