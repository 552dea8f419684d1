"""Figures 18b and 19: what the size of a block does, and swapping against recomputation."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.paper.point import NUM_BATCHES, SEEDS, Point
from benchmarks.paper.rates import at_share, by_seed, saturated
from benchmarks.paper.runner import Runner
from benchmarks.paper.spread import Spread
from benchmarks.paper.table import Table
from jpaged.hardware import HARDWARE
from jpaged.plan.cost import StepLoad
from jpaged.plan.simulator.deployment import MODELS, deploy

_SIZES = (1, 8, 16, 32, 64, 128, 256)
_PREEMPTION_SIZES = (1, 4, 16, 64, 256)
_SHARE = 0.7
"""The share of what paged memory sustains with blocks of 16."""
_PREEMPTED_TOKENS = 500
_TIGHT_SLOTS = 8000


def block_sizes(runner: Runner) -> Table:
    """Figure 18b: latency by block size."""
    table = Table(
        "f18_block_size",
        "F18b  mean normalized latency (s/token) by block size (OPT-13B)",
        [
            "The paper: on ShareGPT 16 to 128 are best; on Alpaca 16 and 32, and larger blocks are much worse, as "
            "sequences become shorter than a block. No numbers are given in its text.",
            f"Each workload at {_SHARE:g} of what blocks of 16 sustain. low and high are the extremes of the "
            "seeds. growing is in how many of them the queue grew: such a size does not sustain that rate, and its "
            "latency is a matter of the trace's length.",
            "Small blocks are slow because the cost model reads short runs of memory below the full bandwidth: at 16 "
            "by what the paper measured of its kernel, elsewhere by an assumed curve through that.",
        ],
        {"seeds": str(SEEDS), "num_batches": NUM_BATCHES, "share": _SHARE},
    )
    loads = {workload: _load(runner, Point("paged", workload), _SHARE) for workload in ("sharegpt", "alpaca")}
    for size in _SIZES:
        cells: dict[str, float] = {}
        for workload, at_rate in loads.items():
            cells |= {f"{workload}_rate_per_s": at_rate.rate_per_s}
            cells |= _latency_cells(runner, replace(at_rate, block_size=size), workload)
        table.add(block_size=size, **cells)
    return table


def _load(runner: Runner, base: Point, share: float) -> Point:
    """The point at a share of what it sustains."""
    results = saturated(runner, base, (base.system,), SEEDS)[base.system]
    return at_share(base, Spread.of(by_seed(results).values()).mean, share)


def _latency_cells(runner: Runner, point: Point, name: str) -> dict[str, float]:
    """Latency over the seeds, and in how many of them the queue grew."""
    results = runner.run(replace(point, seed=seed) for seed in SEEDS).values()
    latency = Spread.of(result.normalized_latency_s for result in results)
    return {**latency.cells(f"{name}_latency_s"), f"{name}_growing": sum(result.queue_grows for result in results)}


def preemption_costs() -> Table:
    """Figure 19a: one preempted sequence, out and back, by block size."""
    table = Table(
        "f19a_preemption_cost",
        f"F19a  milliseconds to preempt and bring back a sequence of {_PREEMPTED_TOKENS} tokens (OPT-13B)",
        [
            "The paper: recomputation does not depend on the block size and is better for small blocks; swapping, "
            "which small transfers limit, is better for large ones, where recomputation costs up to 20 percent more.",
            "Ours crosses between 16 and 32, and recomputation costs 50 percent more at 256: 5 us for a transfer, two "
            "transfers a block and layer, 25.6 GB/s and half of the peak FLOP/s are assumptions, and a prompt that is "
            "computed faster, or a link that is slower, brings the two together.",
            "recompute_ms is what the prompt adds to a step that other rows have too, with 10,000 tokens of context; "
            "alone it would be step_ms. With blocks of 1, reading that context hides half of the prompt.",
        ],
    )
    for size in _SIZES:
        deployment = deploy(MODELS["opt-13b"], HARDWARE["a100-40gb"], block_size=size)
        num_blocks = -(-_PREEMPTED_TOKENS // size)
        swap_s = deployment.swap_s(num_blocks)
        with_it = deployment.step_s(StepLoad(1, _PREEMPTED_TOKENS, 10_000, 10_000 + _PREEMPTED_TOKENS**2 // 2))
        table.add(
            block_size=size,
            swap_out_ms=1000 * swap_s,
            swap_in_ms=1000 * swap_s,
            swap_both_ms=2000 * swap_s,
            recompute_ms=1000 * (with_it - deployment.step_s(StepLoad(1, 1, 10_000, 10_000))),
            step_ms=1000
            * deployment.step_s(StepLoad(1, _PREEMPTED_TOKENS, _PREEMPTED_TOKENS, _PREEMPTED_TOKENS**2 // 2)),
        )
    return table


def preemption_end_to_end(runner: Runner) -> Table:
    """Figure 19b: latency of a loaded system that swaps, and of one that recomputes."""
    at_rate = _load(runner, Point("paged", "sharegpt", num_kv_slots=_TIGHT_SLOTS), _SHARE)
    table = Table(
        "f19b_preemption_latency",
        "F19b  mean normalized latency (s/token) by preemption "
        f"(OPT-13B, ShareGPT, {_TIGHT_SLOTS} slots, {at_rate.rate_per_s:g}/s)",
        [
            "The paper: from 16 to 64 both perform alike; below, recomputation is the better one. "
            "No numbers are given in its text.",
            "The pool is made half as large as the paper's so that it preempts more often. The rate is "
            f"{_SHARE:g} of what it sustains with blocks of 16 and recomputation. low and high are the extremes "
            "of the seeds, growing is in how many of them the queue grew.",
        ],
        {"seeds": str(SEEDS), "num_batches": NUM_BATCHES},
    )
    for size in _PREEMPTION_SIZES:
        swap = replace(at_rate, block_size=size, preemption="swap", host_blocks_share=2.0)
        recompute = replace(at_rate, block_size=size, preemption="recompute")
        swapped, recomputed = (
            [runner.run([replace(point, seed=seed)])[replace(point, seed=seed)] for seed in SEEDS]
            for point in (swap, recompute)
        )
        table.add(
            block_size=size,
            **_latency_cells(runner, swap, "swap"),
            **_latency_cells(runner, recompute, "recompute"),
            swap_preemptions=sum(one.num_preemptions for one in swapped),
            recompute_preemptions=sum(one.num_preemptions for one in recomputed),
            swap_s=sum(one.swap_s for one in swapped),
            recomputed_tokens=sum(one.num_recomputed_tokens for one in recomputed),
        )
    return table
