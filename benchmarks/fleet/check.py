"""The simulator beside real processes: the same conversations to servers of the small model and to simulated ones.

probes    one server's steps are timed, and by how much those of others that are at work slow them down
real      a day is sent to all of them
probes    the same once more, before the next day: the machine may have become slower or faster
simulated each day, with steps as long as the probes before and behind it say
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.fleet.drive import Driver, Run
from benchmarks.fleet.neighbours import Processors
from benchmarks.fleet.probes import probe
from benchmarks.fleet.servers import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    MODEL,
    NUM_BLOCKS,
    num_processors,
    started,
)
from benchmarks.fleet.times import DrawnTimes, MeasuredTimes
from jpaged.client import AsyncClient
from jpaged.hardware import HARDWARE
from jpaged.plan.compilation import find_config
from jpaged.plan.fleet.day import Day, TurnLengths, draw_sessions
from jpaged.plan.fleet.fleet import FleetOptions, SimulatedFleet
from jpaged.plan.fleet.outcomes import Outcome, itl_s, ttft_s
from jpaged.plan.fleet.replica import ReplicaPool
from jpaged.plan.fleet.routing import Rule
from jpaged.plan.fleet.topology import PoolKind, Serving
from jpaged.plan.simulator.deployment import SimulatedModel, deploy

WINDOW_S = 0.005
"""The driver of real servers knows at once what has ended, and who is at work slows others down at once; in simulation
so late."""
PROBE_ROUNDS = 1


def day_of(seconds: float, rate_per_s: float) -> Day:
    """Conversations that fit into the small model's 1024 tokens."""
    return Day(
        seconds=seconds,
        rate_per_s=rate_per_s,
        max_model_len=MAX_MODEL_LEN,
        swing=0.3,
        num_tenants=12,
        system=TurnLengths(160.0, 0.4),
        said=TurnLengths(48.0, 0.7),
        answered=TurnLengths(48.0, 0.5),
        mean_turns=2.5,
        mean_thinking_s=1.5,
        min_thinking_s=0.3,
    )


def compare(num_replicas: int, rate_per_s: float, seconds: float, rule: Rule, seeds: Sequence[int]) -> dict[str, Any]:
    """Numbers of both, and how far apart they are, of a day for each seed."""
    day = day_of(seconds, rate_per_s)
    with started(num_replicas) as targets:
        served = asyncio.run(_serve(targets, day, rule, seeds))
    return {
        "num_replicas": num_replicas,
        "rate_per_s": rate_per_s,
        "seconds": seconds,
        "router": rule,
        "days": [
            {"seed": seed, **_compared(num_replicas, day, rule, seed, times, run)}
            for seed, (times, run) in zip(seeds, served, strict=True)
        ],
    }


def _compared(num_replicas: int, day: Day, rule: Rule, seed: int, times: MeasuredTimes, run: Run) -> dict[str, Any]:
    outcome = simulated(num_replicas, num_processors(), day, rule, seed, times)
    real, ours = _numbers_of_run(run), _numbers_of_outcome(outcome)
    return {
        "measured": times.told(),
        "busy_percent": 100 * outcome.totals.busy_s / (num_replicas * outcome.elapsed_s),
        "real": real,
        "simulated": ours,
        "apart_percent": {key: 100 * (ours[key] / real[key] - 1) for key in real},
    }


async def _serve(targets: Sequence[str], day: Day, rule: Rule, seeds: Sequence[int]) -> list[tuple[MeasuredTimes, Run]]:
    """A day for each seed, with what steps took before it and behind it."""
    clients = [AsyncClient(target) for target in targets]
    served = list[tuple[MeasuredTimes, Run]]()
    try:
        warm = dataclasses.replace(day, seconds=5.0)
        await Driver(clients, rule, warm, seeds[0] + 1).run(draw_sessions(warm, seeds[0] + 1))
        before = await probe(clients, num_processors(), PROBE_ROUNDS, seeds[0])
        for seed in seeds:
            run = await Driver(clients, rule, day, seed).run(draw_sessions(day, seed))
            behind = await probe(clients, num_processors(), PROBE_ROUNDS, seed + 1)
            served.append((before.and_then(behind), run))
            before = behind
        return served
    finally:
        for client in clients:
            await client.close()


def simulated(num_replicas: int, num_cpus: int, day: Day, rule: Rule, seed: int, times: MeasuredTimes) -> Outcome:
    """The same day on replicas whose steps take what was measured, on a machine of so many CPUs."""
    _, config = find_config(MODEL)
    model = SimulatedModel(MODEL, config, 1e6)
    deployment = deploy(model, HARDWARE["h100"], num_kv_slots=NUM_BLOCKS * BLOCK_SIZE, block_size=BLOCK_SIZE)
    serving = Serving(MODEL, MAX_MODEL_LEN, BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
    kind = PoolKind(MODEL, MODEL, NUM_BLOCKS * BLOCK_SIZE, 1, 0.0, None)
    options = FleetOptions(rule, seed=seed, window_s=WINDOW_S, replays=False)
    processors = Processors(num_replicas, num_cpus, WINDOW_S)
    pools = [
        ReplicaPool(
            dataclasses.replace(
                deployment, drawn=functools.partial(DrawnTimes, times, 1000 * seed + place, processors, place)
            ),
            serving.engine,
        )
        for place in range(num_replicas)
    ]
    return SimulatedFleet(
        pools, [kind] * num_replicas, range(num_replicas), day, draw_sessions(day, seed), options
    ).run()


def _numbers_of_run(run: Run) -> dict[str, float]:
    ttfts_s, itls_s = np.array([one.ttft_s for one in run.turns]), np.array([one.itl_s for one in run.turns])
    num_tokens = sum(one.num_tokens for one in run.turns)
    return _numbers(len(run.turns), num_tokens, run.elapsed_s, ttfts_s, itls_s) | {"hit_percent": run.hit_percent}


def _numbers_of_outcome(outcome: Outcome) -> dict[str, float]:
    ends, totals = outcome.ends, outcome.totals
    elapsed_s = max(end.end_s for end in ends)
    num_tokens = sum(end.num_tokens for end in ends)
    hit_percent = 100 * totals.num_prefix_hit_tokens / max(1, totals.num_prefix_query_tokens)
    numbers = _numbers(len(ends), num_tokens, elapsed_s, ttft_s(ends), itl_s(ends))
    return numbers | {"hit_percent": hit_percent}


def _numbers(
    num_turns: int, num_tokens: int, elapsed_s: float, ttfts_s: np.ndarray[Any, Any], itls_s: np.ndarray[Any, Any]
) -> dict[str, float]:
    itls_s = itls_s[itls_s > 0]
    return {
        "requests_per_s": num_turns / elapsed_s,
        "tokens_per_s": num_tokens / elapsed_s,
        "ttft_mean_ms": 1e3 * float(ttfts_s.mean()),
        "ttft_p90_ms": 1e3 * float(np.percentile(ttfts_s, 90)),
        "itl_mean_ms": 1e3 * float(itls_s.mean()),
        "itl_p90_ms": 1e3 * float(np.percentile(itls_s, 90)),
    }
