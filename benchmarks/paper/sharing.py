"""Figures 14 to 17: several sequences a request, shared prefixes, and conversations."""

from __future__ import annotations

import json

from benchmarks.paper.point import LABELS, NUM_BATCHES, SEEDS, Point
from benchmarks.paper.rates import BASELINES, by_seed, over_baseline, saturated
from benchmarks.paper.runner import Runner
from benchmarks.paper.spread import Spread
from benchmarks.paper.table import RESULTS, Table

SIZES = (2, 4, 6)
_SEED = SEEDS[:1]
_SEVERAL_BATCHES = 34.0
"""More than elsewhere, as beams share so much that a batch is larger than its estimate."""
_SHAREGPT_BEAM_BATCHES = {2: 50.0, 4: 100.0, 6: 10.0}
"""Beams share so much of ShareGPT's tokens that few of these are left in the window; six would take 150 for 20."""
_F14_PAPER = {("one", 1): 1.3, ("beam", 6): 2.3}
_F15_PAPER = {
    ("alpaca", "parallel"): (6.09, 8.53, 9.79),
    ("alpaca", "beam"): (37.56, 53.13, 55.16),
    ("sharegpt", "parallel"): (16.2, None, 30.5),
    ("sharegpt", "beam"): (44.3, None, 66.3),
}
_CASES = [*(("parallel", size) for size in SIZES), *(("beam", size) for size in SIZES)]


def several_sequences(runner: Runner) -> Table:
    """Figure 14: parallel sampling and beam search on Alpaca."""
    table = Table(
        "f14_several_sequences",
        "F14  requests/s sustained with several sequences a request (OPT-13B, Alpaca)",
        [
            "The paper: over Orca (Oracle) 1.3 times for one sequence and 2.3 times for beam search of width 6; the "
            "gain grows with the number of sequences, and more for beams, which share more.",
            "paged_batched requests of paged memory run at a time, of the 256 / size that the rows allow; for "
            "flops_percent of the time its steps take as long as their FLOPs, so that more rows would take longer.",
            "The reserving systems copy the prompt for each sequence and a beam's whole context at each fork, as the "
            "paper says of them; beams fork at random here, see F15.",
        ],
        {"seed": _SEED[0], "num_batches": _SEVERAL_BATCHES, "num_batches_of_one": NUM_BATCHES},
    )
    systems = ("paged", "oracle", "pow2", "max")
    for kind, size in [("one", 1), *_CASES]:
        results = saturated(runner, _sharing_point("alpaca", kind, size), systems, _SEED)
        rates = {system: some[0].sustained_per_s for system, some in results.items()}
        table.add(
            kind=kind,
            size=size,
            **rates,
            paged_over_oracle=rates["paged"] / rates["oracle"],
            paper=_F14_PAPER.get((kind, size)),
            paged_over_max=rates["paged"] / rates["max"],
            paged_batched=results["paged"][0].mean_batched_requests,
            oracle_batched=results["oracle"][0].mean_batched_requests,
            flops_percent=100 * results["paged"][0].flops_bound_share,
        )
    return table


def shared_blocks(runner: Runner) -> Table:
    """Figure 15: the share of blocks that sharing saves."""
    table = Table(
        "f15_shared_blocks",
        "F15  blocks saved by sharing / blocks without sharing, percent (OPT-13B)",
        [
            "Every sample of a request has the request's one length here, as the trace gives one. What samples share "
            "is their prompt: how much that is of all tokens depends on the longest outputs, and on whether long "
            "prompts have long outputs. Here both are lognormal and independent.",
            "Beams fork and die by alternatives drawn at random (see `jpaged.plan.simulator.simulation`): how much "
            "beams share is a property of the model's text, which a simulation does not have. demo is the demo model's "
            "own text, with Alpaca's lengths (real_f15).",
            "The paper gives ranges for ShareGPT; they stand at the smallest and the largest size.",
            "batches went through the window: 20 and more, but for six beams on ShareGPT, which share so much that 20 "
            "would take 1,000 requests.",
        ],
        {
            "seed": _SEED[0],
            "num_batches": _SEVERAL_BATCHES,
            "num_batches_of_beams_on_sharegpt": str(tuple(_SHAREGPT_BEAM_BATCHES.values())),
        },
    )
    points = {
        (workload, kind, size): _sharing_point(workload, kind, size)
        for workload in ("alpaca", "sharegpt")
        for kind, size in _CASES
    }
    results = runner.run(points.values())
    for (workload, kind, size), point in points.items():
        paper = _F15_PAPER[workload, kind][SIZES.index(size)]
        table.add(
            workload=workload,
            kind=kind,
            size=size,
            paper=paper,
            ours=100 * results[point].shared_share,
            demo=_demo_shares().get((kind, size)) if workload == "alpaca" else None,
            batches=results[point].num_batches,
        )
    return table


def _demo_shares() -> dict[tuple[str, int], float]:
    """What `benchmarks.paper.real` measured; nothing where it has not run."""
    path = RESULTS / "real_f15.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {(row["kind"], row["size"]): row["ours"] for row in rows}


def _sharing_point(workload: str, kind: str, size: int) -> Point:
    if kind == "one":
        return Point("paged", workload)
    n, beam_width = (1, size) if kind == "beam" else (size, 0)
    batches = _SHAREGPT_BEAM_BATCHES[size] if (workload, kind) == ("sharegpt", "beam") else _SEVERAL_BATCHES
    return Point("paged", workload, n=n, beam_width=beam_width, num_batches=batches)


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
        {"seed": _SEED[0], "num_batches": NUM_BATCHES},
    )
    labels = {
        "oracle": LABELS["oracle"],
        "paged": "paged, nothing shared",
        "shared": "paged, prefix shared (the paper's vLLM)",
        "jpaged": LABELS["jpaged"],
    }
    for shots, prefix_tokens, paper in ((1, 80, 1.67), (5, 341, 3.58)):
        base = Point("paged", "translation", model="llama-13b", prefix_tokens=prefix_tokens)
        results = saturated(runner, base, labels, _SEED)
        oracle = results["oracle"][0].sustained_per_s
        for system, (result,) in results.items():
            table.add(
                shots=shots,
                prefix_tokens=prefix_tokens,
                system=labels[system],
                requests_per_s=result.sustained_per_s,
                over_oracle=result.sustained_per_s / oracle,
                paper=paper if system == "shared" else None,
                batched=result.mean_batched_requests,
                batches=result.num_batches,
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
            "How many rounds a conversation has is assumed (up to 6). The gain is below the paper's: a batch is 1.7 to "
            "1.9 times as large, and each of its steps takes longer, as it reads a full pool, and blocks slower than "
            "regions.",
            "The prefix cache finds earlier prompts of a conversation while it is not cut; what the model said is not "
            "among them in a simulation, so that its share is a lower bound.",
        ],
        {"seeds": str(SEEDS), "num_batches": NUM_BATCHES},
    )
    systems = ("oracle", "pow2", "max", "paged", "jpaged")
    results = saturated(runner, Point("paged", "chatbot"), systems, SEEDS)
    paged = by_seed(results["paged"])
    for system, some in results.items():
        over = over_baseline(paged, system, some)
        table.add(
            system=LABELS[system],
            **Spread.of(by_seed(some).values()).cells("requests_per_s"),
            **over,
            paper=2.0 if system in BASELINES else None,
            batched=Spread.of(one.mean_batched_requests for one in some).mean,
            flops_percent=100 * Spread.of(one.flops_bound_share for one in some).mean,
            batches=min(one.num_batches for one in some),
        )
    return table
