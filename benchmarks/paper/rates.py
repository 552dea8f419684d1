"""Figure 12: the request rate that each system sustains, and the latency on the way there.

A system is saturated, with every request there from the beginning, and what it sustains is its rate between filling and
draining (`plan/simulator/simulation.py`). Arrivals below that rate find no queue that grows, arrivals above it do:
the latency curves are measured at shares of it, and the last share shows that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from benchmarks.paper.point import LABELS, LEAST_BATCHES, NUM_BATCHES, SEEDS, Measured, Point
from benchmarks.paper.runner import Runner
from benchmarks.paper.spread import Spread, empty_cells, ratio
from benchmarks.paper.table import Table
from jpaged.errors import InternalError
from jpaged.plan.simulator.trace import WORKLOADS

SHARES = (0.5, 0.75, 0.9, 1.2)
"""Rates of the latency curves, relative to what the system sustains."""
COMPARED = ("paged", "oracle", "pow2", "max", "static")
BASELINES = COMPARED[1:]
PAPER_RATIOS = {"oracle": (1.7, 2.7), "max": (2.7, 8.0)}
"""Paged over a baseline on ShareGPT, over the three models; the paper gives no numbers of single panels."""
PAPER_STATIC = 22.0
"""The most that it reached over FasterTransformer."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of figure 12.

    Attributes:
        seeds: of the sustained rates.
        curves: systems whose latency is measured as well.
    """

    model: str
    workload: str
    seeds: tuple[int, ...] = SEEDS
    curves: tuple[str, ...] = COMPARED

    @property
    def name(self) -> str:
        return f"{self.model}, {self.workload}"


# OPT-175B takes longer than all others together; on Alpaca it has 256 rows a step and does not wait for memory.
PANELS = (
    Panel("opt-13b", "sharegpt"),
    Panel("opt-66b", "sharegpt"),
    Panel("opt-175b", "sharegpt", curves=("paged", "oracle")),
    Panel("opt-13b", "alpaca"),
    Panel("opt-66b", "alpaca"),
    Panel("opt-175b", "alpaca", SEEDS[:1], curves=()),
)


def saturated(runner: Runner, point: Point, systems: Iterable[str], seeds: Iterable[int]) -> dict[str, list[Measured]]:
    """Every system at every seed, with all requests there from the beginning.

    Raises:
        InternalError: a trace had fewer batches between filling and draining than a steady rate takes.
    """
    points = {system: [replace(point, system=system, seed=seed) for seed in seeds] for system in systems}
    results = runner.run(one for some in points.values() for one in some)
    for one, result in results.items():
        if result.num_batches < LEAST_BATCHES:
            raise InternalError(f"{one} went through {result.num_batches:.1f} batches, below {LEAST_BATCHES}")
    return {system: [results[one] for one in some] for system, some in points.items()}


def by_seed(results: Iterable[Measured]) -> dict[int, float]:
    """The sustained rates, numbered."""
    return {i: result.sustained_per_s for i, result in enumerate(results)}


def over_baseline(paged: dict[int, float], system: str, some: Iterable[Measured]) -> Mapping[str, float | None]:
    """Cells: how many times a baseline's rate paged memory sustains; empty ones for what is no baseline."""
    name = "paged_over_it"
    return ratio(paged, by_seed(some)).cells(name) if system in BASELINES else empty_cells(name)


def sustained(runner: Runner) -> Table:
    """Figure 12 as numbers."""
    table = Table(
        "f12_sustained",
        "F12  requests/s sustained, and paged relative to each baseline",
        [
            "The paper: on ShareGPT 1.7 to 2.7 over Orca (Oracle) and 2.7 to 8 over Orca (Max), up to 22 over "
            "FasterTransformer; Alpaca is similar, but for OPT-175B, where memory is large and sequences are short, "
            "so that the gain over Orca (Oracle) and (Pow2) is less pronounced.",
            "low and high are the extremes of the seeds; OPT-175B on Alpaca has one seed. batches went through the "
            "window, the least of the seeds.",
            "step_ms is how long a request that runs waits for a token, by Little's law. flops_percent of the time was "
            "in steps that took as long as their FLOPs, and not as their bytes.",
            "Rates are of a modelled device (see jpaged/plan/simulator): ratios compare, absolute rates do so only "
            "roughly.",
            "A batch has at most 256 sequences: on OPT-175B with Alpaca that limit, and not memory, is what paged "
            "memory and reserve-oracle run into, and each waits for the same.",
        ],
        {"seeds": str(SEEDS), "num_batches": NUM_BATCHES},
    )
    for panel in PANELS:
        results = saturated(runner, Point("paged", panel.workload, model=panel.model), COMPARED, panel.seeds)
        paged = by_seed(results["paged"])
        for system, some in results.items():
            over = over_baseline(paged, system, some)
            table.add(
                panel=panel.name,
                system=LABELS[system],
                **Spread.of(by_seed(some).values()).cells("requests_per_s"),
                **over,
                paper=_paper(panel, system),
                batched=Spread.of(one.mean_batched_requests for one in some).mean,
                step_ms=1000 * _step_s(panel, some),
                flops_percent=100 * Spread.of(one.flops_bound_share for one in some).mean,
                batches=min(one.num_batches for one in some),
            )
    return table


def _step_s(panel: Panel, some: Iterable[Measured]) -> float:
    """Little's law: a batch is rate * output tokens * seconds a step."""
    num_tokens = WORKLOADS[panel.workload].output.mean
    return Spread.of(one.mean_batched_requests / (one.sustained_per_s * num_tokens) for one in some).mean


def latency_curves(runner: Runner) -> Table:
    """Figure 12 as curves: below the sustained rate, and once above it, to see the queue grow."""
    table = Table(
        "f12_latency",
        "F12  mean normalized latency against request rate",
        [
            "share is of what the system sustains. Of a trace of so many batches the first fifth and the last tenth of "
            "the requests are left out.",
            "queue_grows: the line through the number of waiting requests rises by more than a batch, and the queue "
            "was never empty in the last quarter of the arrivals. The latency is then a matter of the trace's length, "
            "and the figure leaves the point out.",
            "The paper's figure has no numbers; its text gives the ratios of table f12_sustained.",
        ],
        {"seed": SEEDS[0], "num_batches": NUM_BATCHES},
    )
    for panel in PANELS:
        base = Point("paged", panel.workload, model=panel.model)
        for system, some in saturated(runner, base, panel.curves, panel.seeds).items():
            rate = Spread.of(by_seed(some).values()).mean
            for share in SHARES:
                point = at_share(replace(base, system=system), rate, share)
                result = runner.run([point])[point]
                table.add(
                    panel=panel.name,
                    system=LABELS[system],
                    share=share,
                    requests_per_s=point.rate_per_s,
                    normalized_latency_s=result.normalized_latency_s,
                    queue_grows=result.queue_grows,
                    batched=result.mean_batched_requests,
                    batches=result.num_batches,
                )
    return table


def at_share(point: Point, sustained_per_s: float, share: float) -> Point:
    """The point at a share of what it sustains. A lighter load has smaller batches, and the trace fewer requests."""
    rate = float(f"{share * sustained_per_s:.3g}")
    return replace(point, rate_per_s=rate, num_batches=NUM_BATCHES * min(1.0, share))


def _paper(panel: Panel, system: str) -> str | None:
    if panel.workload == "alpaca":
        if panel.model == "opt-175b" and system in ("oracle", "pow2"):
            return "less pronounced"
        return "like ShareGPT" if system in BASELINES else None
    if system == "static":
        return f"up to {PAPER_STATIC:g}"
    return "{:g} to {:g}".format(*PAPER_RATIOS[system]) if system in PAPER_RATIOS else None
