"""Figures 2, 11 and 13: what fills memory, how long the requests are, and how many of them memory holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.paper.point import LABELS, NUM_BATCHES, SEEDS, Measured, Point, trace
from benchmarks.paper.rates import saturated
from benchmarks.paper.runner import Runner
from benchmarks.paper.spread import Spread
from benchmarks.paper.table import Table

_HELD = ("max", "pow2", "oracle", "paged")
PARTS = ("tokens", "reserved", "internal", "external")
_F2_PAPER: dict[str, tuple[float | None, ...]] = {
    "max": (20.4, 13.3, 57.3, 8.9),
    "pow2": (26.8, 17.9, 13.6, 41.6),
    "oracle": (38.2, 25.2, None, 36.6),
    "paged": (96.3, None, None, None),
}
_F11_PAPER = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}
_F13_PAPER = {
    "sharegpt": (2.0, {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "paged": 30.42}),
    "alpaca": (30.0, {"max": 7.00, "pow2": 43.24, "oracle": 72.75, "paged": 132.44}),
}


def pool_shares(runner: Runner) -> Table:
    """Figure 2: what the slots of the pool are."""
    table = Table(
        "f02_pool_shares",
        "F2  what the slots of the pool are, percent (OPT-13B, ShareGPT, saturated)",
        [
            "tokens hold one; reserved will be written by the request that has them; internal never will be; external "
            "is the rest: no region fits in, or the buddy allocator rounded it up. They add up to 100.",
            "Of paged memory, reserved are the ends of last blocks, whether they will be written or not, and external "
            "is what was free when a step began: the hundredth that is kept back when requests are admitted, for one.",
            "The paper's oracle has no internal part, and of paged memory it gives the tokens alone.",
        ],
        {"seeds": str(SEEDS), "num_batches": NUM_BATCHES},
    )
    results = saturated(runner, Point("paged", "sharegpt"), _HELD, SEEDS)
    for system, some in results.items():
        for part, paper in zip(PARTS, _F2_PAPER[system], strict=True):
            shares = Spread.of(100 * _share(one, part) for one in some)
            table.add(system=LABELS[system], part=part, paper=paper, **shares.cells("ours"))
    return table


def _share(measured: Measured, part: str) -> float:
    shares = measured.pool_shares
    return 0.0 if shares is None else float(getattr(shares, part))


def request_lengths() -> Table:
    """Figure 11: lengths of prompts and outputs."""
    table = Table(
        "f11_lengths",
        "F11  lengths of prompts and outputs, tokens",
        [
            "Lognormal, clipped to the model's 2048 tokens; the means are the paper's, the spreads are read off the "
            "shape of its histograms. The traces of the real datasets are not here.",
        ],
        {"seed": SEEDS[0], "num_batches": NUM_BATCHES},
    )
    for workload, paper in _F11_PAPER.items():
        requests = trace(Point("paged", workload))
        kinds = ([r.prompt_tokens for r in requests], [r.output_tokens for r in requests])
        for kind, lengths, mean in zip(("prompt", "output"), kinds, paper, strict=True):
            p10, p50, p90, p99 = (float(np.percentile(lengths, q)) for q in (10, 50, 90, 99))
            table.add(
                workload=workload,
                kind=kind,
                paper_mean=mean,
                mean=float(np.mean(lengths)),
                p10=p10,
                p50=p50,
                p90=p90,
                p99=p99,
            )
    return table


def batched_requests(runner: Runner) -> Table:
    """Figure 13: the mean number of requests in a batch."""
    table = Table(
        "f13_batched_requests",
        "F13  mean number of requests in a batch (OPT-13B)",
        [
            "saturated is what memory holds, and the number to compare; low and high are the extremes of the seeds.",
            "at_rate is at the paper's rate, where it is below what the system sustains: by Little's law it is rate * "
            "output tokens * seconds a step, and does not ask how much memory there is. Where it is empty, the rate is "
            "above what the system sustains, and the batch is the saturated one.",
            "On Alpaca at 30/s the paper's 132 requests are 75 ms a step; the model has no cost that grows with the "
            "number of sequences (sampling, Python, padding), so that fewer requests carry the same rate.",
        ],
        {"seeds": str(SEEDS), "num_batches": NUM_BATCHES},
    )
    for workload, (rate, paper) in _F13_PAPER.items():
        results = saturated(runner, Point("paged", workload), paper, SEEDS)
        for system, some in results.items():
            table.add(
                workload=workload,
                rate_per_s=rate,
                system=LABELS[system],
                paper=paper[system],
                **Spread.of(one.mean_batched_requests for one in some).cells("saturated"),
                at_rate=_batched_at(runner, Point(system, workload), rate, some),
            )
    return table


def _batched_at(runner: Runner, point: Point, rate_per_s: float, some: list[Measured]) -> float | None:
    sustained = Spread.of(one.sustained_per_s for one in some).mean
    if rate_per_s >= sustained:
        return None
    batches = NUM_BATCHES * rate_per_s / sustained
    points = [replace(point, rate_per_s=rate_per_s, num_batches=batches, seed=seed) for seed in SEEDS]
    return Spread.of(one.mean_batched_requests for one in runner.run(points).values()).mean
