"""Figures 12, 14, 16 and 17: the request rate that each system sustains, and the latency on the way there.

What a system sustains is measured with every request there from the beginning: the rate at which the middle half of
them ends. In a long trace latency grows without bound above that rate, which is what the paper reads off its curves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.paper.point import AT_ONCE, LABELS, SEED, Measured, Point, Runner
from benchmarks.paper.table import Table

SHARES = (0.5, 0.85, 1.15)
"""Rates of the latency curves, relative to what the system sustains."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of figure 12, and how many requests it takes to fill the pool several times."""

    model: str
    workload: str
    num_requests: int

    @property
    def name(self) -> str:
        return f"{self.model}, {self.workload}"


PANELS = (
    Panel("opt-13b", "sharegpt", 160),
    Panel("opt-66b", "sharegpt", 100),
    Panel("opt-175b", "sharegpt", 400),
    Panel("opt-13b", "alpaca", 600),
    Panel("opt-66b", "alpaca", 400),
    Panel("opt-175b", "alpaca", 1000),
)
_BASELINES = ("oracle", "pow2", "max", "static")


def latency_curves(runner: Runner) -> tuple[Table, Table]:
    """Figure 12: (rates sustained, latency at rates around them)."""
    sustained = Table(
        "f12_sustained",
        "F12  requests/s sustained, and paged relative to each baseline",
        [
            "The paper's ranges are over all its panels: 1.7 to 2.7 over Orca (Oracle) and 2.7 to 8 over Orca (Max) on "
            "ShareGPT, up to 22 over FasterTransformer; on Alpaca the gains are larger, and nearly vanish for OPT-175B "
            "where memory is large and sequences are short.",
            "Rates are of a modelled device (see jpaged/sim): ratios compare, absolute rates do so only roughly.",
            "A batch has at most 256 sequences, as vLLM's: on OPT-175B with Alpaca that limit, and not memory, is what "
            "paged memory runs into.",
        ],
        {"seed": SEED},
    )
    curves = Table("f12_latency", "F12  mean normalized latency against request rate", [], {"seed": SEED})
    for panel in PANELS:
        base = Point("paged", panel.workload, AT_ONCE, panel.num_requests, panel.model)
        points = {system: replace(base, system=system) for system in LABELS}
        rates = {s: r.saturated_requests_per_s for s, r in _by_system(runner, points).items()}
        for system, rate in rates.items():
            sustained.add(
                panel=panel.name,
                system=LABELS[system],
                requests_per_s=rate,
                paged_over_it=rates["paged"] / rate if system in _BASELINES else None,
                paper=_F12_PAPER.get((panel.workload, system))
                if panel.name != "opt-175b, alpaca"
                else _vanishes(system),
            )
        _add_curves(runner, curves, panel, rates)
    return sustained, curves


_F12_PAPER = {
    ("sharegpt", "oracle"): "1.7 to 2.7",
    ("sharegpt", "max"): "2.7 to 8",
    ("sharegpt", "static"): "up to 22",
    ("alpaca", "oracle"): "like ShareGPT",
    ("alpaca", "max"): "like ShareGPT",
}


def _vanishes(system: str) -> str | None:
    return "less pronounced" if system in ("oracle", "pow2") else None


def _add_curves(runner: Runner, curves: Table, panel: Panel, rates: dict[str, float]) -> None:
    points = [
        Point(system, panel.workload, float(f"{share * rate:.3g}"), panel.num_requests, panel.model)
        for system, rate in rates.items()
        for share in SHARES
    ]
    for point, result in runner.run(points).items():
        curves.add(
            panel=panel.name,
            system=LABELS[point.system],
            requests_per_s=point.rate_per_s,
            normalized_latency_s=result.normalized_latency_s,
        )


def several_sequences(runner: Runner) -> Table:
    """Figure 14: parallel sampling and beam search on Alpaca."""
    table = Table(
        "f14_several_sequences",
        "F14  requests/s sustained with several sequences a request (OPT-13B, Alpaca)",
        [
            "The paper: over Orca (Oracle) 1.3 times for one sequence and 2.3 times for beam search of width 6; the "
            "gain grows with the number of sequences, and more for beams, which share more.",
            "The reserving systems copy the prompt for each sequence and a beam's whole context at each fork, as the "
            "paper says of them; beams fork at random here, see F15.",
            "A batch has at most 256 sequences: 42 requests of 6.",
        ],
        {"seed": SEED, "num_sequences": 600, "least_requests": 120},
    )
    cases = [("one", 1, 0), *(("parallel", n, 0) for n in (2, 4, 6)), *(("beam", 1, width) for width in (2, 4, 6))]
    paper = {("one", 1): 1.3, ("beam", 6): 2.3}
    for kind, n, width in cases:
        size = max(n, width)
        base = Point("paged", "alpaca", AT_ONCE, max(120, 600 // size), n=n, beam_width=width)
        points = {s: replace(base, system=s) for s in ("paged", "oracle", "pow2", "max", "jpaged")}
        rates = {s: r.saturated_requests_per_s for s, r in _by_system(runner, points).items()}
        table.add(
            kind=kind,
            size=size,
            **rates,
            paged_over_oracle=rates["paged"] / rates["oracle"],
            paper=paper.get((kind, size)),
            paged_over_max=rates["paged"] / rates["max"],
        )
    return table


def shared_prefix(runner: Runner) -> Table:
    """Figure 16: translation with a shared prefix of one or five examples."""
    table = Table(
        "f16_shared_prefix",
        "F16  requests/s sustained with a shared prefix (LLaMA-13B, translation)",
        [
            "The paper's vLLM computes the prefix once and shares its blocks: that is the prefix cache here, and the "
            "row without it is paged memory alone.",
            "Lengths of the sentences are assumed (40 tokens in, 40 out), as the paper does not give them: the gain is "
            "over the paper's because so short an output makes the prefix most of the work. Prompts are compute-bound "
            "in the model, so that a prefix which is not computed saves all of its time.",
        ],
        {"seed": SEED, "num_requests": 600},
    )
    for shots, prefix_tokens, paper in ((1, 80, 1.67), (5, 341, 3.58)):
        base = Point("paged", "translation", AT_ONCE, 600, "llama-13b", prefix_tokens=prefix_tokens)
        labels = {
            "oracle": LABELS["oracle"],
            "paged": "paged, nothing shared",
            "shared": "paged, prefix shared (the paper's vLLM)",
            "jpaged": LABELS["jpaged"],
        }
        points = {s: replace(base, system=s) for s in labels}
        rates = {s: r.saturated_requests_per_s for s, r in _by_system(runner, points).items()}
        for system, rate in rates.items():
            table.add(
                shots=shots,
                prefix_tokens=prefix_tokens,
                system=labels[system],
                requests_per_s=rate,
                over_oracle=rate / rates["oracle"],
                paper=paper if system == "shared" else None,
            )
    return table


def chatbot(runner: Runner) -> Table:
    """Figure 17: conversations, with prompts cut to their last 1024 tokens."""
    table = Table(
        "f17_chatbot",
        "F17  requests/s sustained as a chatbot (OPT-13B, ShareGPT conversations)",
        [
            "Prompts are the last 1024 tokens of a conversation, outputs at most 1024. The paper finds the three Orcas "
            "alike, because the buddy allocator rounds most of their regions up to the same size.",
            "How many rounds a conversation has is assumed (up to 6). The gain is below the paper's: prompts are so "
            "long here that computing them takes a large part of the time, which is the same for every system.",
            "The prefix cache finds earlier prompts of a conversation while it is not cut; what the model said is not "
            "among them in a simulation, so that its share is a lower bound.",
        ],
        {"seed": SEED, "num_requests": 150},
    )
    base = Point("paged", "chatbot", AT_ONCE, 150)
    points = {s: replace(base, system=s) for s in ("oracle", "pow2", "max", "paged", "jpaged")}
    results = _by_system(runner, points)
    paged = results["paged"].saturated_requests_per_s
    for system, result in results.items():
        rate = result.saturated_requests_per_s
        is_baseline = system in _BASELINES
        table.add(
            system=LABELS[system],
            requests_per_s=rate,
            paged_over_it=paged / rate if is_baseline else None,
            paper=2.0 if is_baseline else None,
        )
    return table


def _by_system(runner: Runner, points: dict[str, Point]) -> dict[str, Measured]:
    results = runner.run(points.values())
    return {system: results[point] for system, point in points.items()}
