"""A plan as text and as JSON: memory fit, estimates, cost, and the cheapest target."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jpaged.device.aot.deployment import StartEstimate
from jpaged.plan.compilation import CompiledPlan
from jpaged.plan.estimate import (
    MAX_LOAD,
    ConcurrencyLimits,
    Estimate,
    PlanGoals,
    PlannedService,
    RoleComparison,
    SequenceLengths,
    compare,
    estimate,
    get_price,
    mean_lengths,
    serve,
    usd_per_million,
)
from jpaged.plan.estimate import lines as role_lines

_GIB = 1 << 30
LOAD_BYTES_PER_S = 2e9
"""Assumed rate at which a server reads its weights."""


@dataclass(frozen=True, slots=True)
class PlanWorkload:
    """Workload for which every target is assessed.

    Attributes:
        lengths: lengths of the sequences; a load is an even mix of them.
        tokens_per_s: output tokens to serve; None without a load.
        prices: USD per chip-hour, by target or family; the empty name is for all.
        goals: latency goals for the comparison of roles; None for no comparison.
    """

    lengths: tuple[SequenceLengths, ...]
    tokens_per_s: float | None
    prices: Mapping[str, float]
    goals: PlanGoals | None = None


@dataclass(frozen=True, slots=True)
class Assessment:
    """A plan and its results for a workload. Estimates are of one copy of the model, and empty if it does not fit.

    Attributes:
        estimates: one for each of the lengths.
        price: USD per chip-hour; None if none was given.
        slice_tokens_per_s: output tokens of all copies on the target, for the mix.
        usd_per_million: USD per million output tokens of the mix; None without a price.
        service: slices that carry the load; None without a load.
        roles: comparison for the mix on the copies that carry the load, or on those of the target, and at least two;
            None if not requested, or the model does not fit.
        goals: goals of `roles`.
    """

    plan: CompiledPlan
    estimates: tuple[Estimate, ...]
    price: float | None
    slice_tokens_per_s: float
    usd_per_million: float | None
    service: PlannedService | None
    roles: RoleComparison | None = None
    goals: PlanGoals | None = None


def assess(plan: CompiledPlan, workload: PlanWorkload) -> Assessment:
    """Assess a plan for a workload."""
    price = get_price(workload.prices, plan.target.name, plan.target.family)
    if not plan.deployment.fits:
        return Assessment(plan, (), price, 0.0, None, None)
    deployment = plan.deployment
    pool = ConcurrencyLimits(
        deployment.num_blocks,
        deployment.geometry.block_size,
        deployment.geometry.max_num_seqs,
        deployment.geometry.max_num_batched_tokens,
        deployment.geometry.windows,
        deployment.geometry.num_sink_tokens,
    )
    mix = estimate(mean_lengths(workload.lengths), pool, plan.step_times)
    tokens_per_s = mix.tokens_per_s * plan.num_copies
    num_chips, load = plan.target.num_chips, workload.tokens_per_s
    service = None if load is None else serve(load, tokens_per_s, num_chips, price)
    num_copies = plan.num_copies * (1 if service is None else service.num_slices)
    goals, lengths = workload.goals, mean_lengths(workload.lengths)
    return Assessment(
        plan,
        tuple(estimate(lengths, pool, plan.step_times) for lengths in workload.lengths),
        price,
        tokens_per_s,
        None if price is None else usd_per_million(price, num_chips, tokens_per_s),
        service,
        None if goals is None else compare(lengths, pool, plan.step_times, num_copies, goals),
        goals,
    )


def cheapest(assessments: Sequence[Assessment]) -> Assessment | None:
    """Return the cheapest target that fits and has a price: by the hour for a load, else by the token; or None."""

    def cost(found: Assessment) -> float | None:
        return found.usd_per_million if found.service is None else found.service.usd_per_hour

    priced = [(value, found) for found in assessments if (value := cost(found)) is not None]
    return min(priced, key=lambda pair: pair[0])[1] if priced else None


def lines(found: Assessment) -> list[str]:
    """Return the plan of one target as text."""
    plan, deployment = found.plan, found.plan.deployment
    memory, sizes = deployment.memory, deployment.geometry
    text = [f"{plan.model} on {plan.target.name}: {'fits' if deployment.fits else 'does not fit'}{_by_how_much(found)}"]
    copies = f"{_counted(plan.num_copies, 'copy', 'copies')} of the model"
    text.append(
        f"  {copies}, each over {plan.num_devices} of {plan.target.num_devices} devices; {plan.dtype}, KV cache "
        f"{plan.kv_dtype}, attention {deployment.backend}, sequences of up to {sizes.max_model_len} tokens"
    )
    if plan.num_context_parts > 1:
        text.append(f"  contexts are split over {plan.num_context_parts} devices with the same weights")
    if plan.num_stages > 1:
        text.append(f"  the layers are split into {plan.num_stages} stages, each with the whole vocabulary")
    text += [f"  {line}" for line in deployment.passed_over]
    text.append(
        f"  steps of up to {sizes.max_num_seqs} rows and {sizes.max_num_batched_tokens} tokens, blocks of "
        f"{sizes.block_size}"
    )
    text += [f"  {note}" for note in plan.notes]
    if deployment.problem is not None:
        text.append(f"  {deployment.problem}")
    refusal = deployment.refusal
    if refusal is not None and refusal.message not in (deployment.problem or ""):
        text.append(f"  compiler error: {refusal.message}")
    text += [f"  {line}" for line in memory.lines()]
    if deployment.fits:
        longest = deployment.num_blocks // sum(reach.num_kept(sizes.max_model_len) for reach in sizes.reaches)
        text.append(
            f"  {deployment.num_blocks} blocks of {sizes.block_size} tokens hold {longest} sequences of "
            f"{sizes.max_model_len} tokens, or one of these:"
        )
        text += [f"    {line}" for line in _estimate_lines(found)]
        text.append("  estimated, not measured, assuming:")
        text += [f"    {line}" for line in plan.step_times.assumptions(sizes.max_num_seqs)]
    slowest = max(deployment.programs, key=lambda program: program.seconds, default=None)
    text.append(
        f"  {len(deployment.programs)} of {deployment.num_programs} programs compiled in {deployment.seconds:.1f} s"
        + ("" if slowest is None else f", the slowest {slowest.name} in {slowest.seconds:.1f} s")
    )
    if deployment.start is not None and deployment.fits:
        text += [f"  {line}" for line in _start_lines(deployment.start, memory.request.weight_bytes, plan.num_devices)]
    if found.service is not None:
        text.append(f"  to serve the load: {_service(found.service, plan)}")
    if found.goals is not None and deployment.fits:
        text += _role_lines(found.roles, found.goals)
    return text


def _start_lines(start: StartEstimate, weight_bytes: int, num_devices: int) -> list[str]:
    """Return the estimated time to ready of a server without a compile cache."""
    read_bytes = weight_bytes * num_devices
    read_s = read_bytes / LOAD_BYTES_PER_S
    return [
        f"estimated start without a compile cache: ready in about {read_s + start.first_s:.0f} s",
        f"  {read_s:.0f} s to read {read_bytes / _GIB:.2f} GiB of weights at {LOAD_BYTES_PER_S / 1e9:g} GB/s",
        f"  {start.first_s:.0f} s to compile {start.num_first} programs that the first request needs, on processors "
        "like this machine's",
        f"  {start.num_later} more are compiled in the background, in about {start.later_s:.0f} s; {start.num_timed} "
        "of all were timed",
    ]


def _role_lines(roles: RoleComparison | None, goals: PlanGoals) -> list[str]:
    if roles is None:
        return ["  roles: not compared, because no sequence fits or outputs have one token"]
    return [f"  {line}" for line in role_lines(roles, goals)]


def comparison(assessments: Sequence[Assessment], workload: PlanWorkload) -> list[str]:
    """Return a table of one line per target, and the cheapest; empty for a single target."""
    if len(assessments) < 2:
        return []
    text = [f"{'':4}{'target':<14}{'chips':>6}{'copies':>8}{'tokens/s':>10}{'USD/M tokens':>14}  load"]
    for found in assessments:
        plan = found.plan
        usd = "-" if found.usd_per_million is None else f"{found.usd_per_million:.3f}"
        load = "" if found.service is None else _service(found.service, plan)
        state = load if plan.deployment.fits else "does not fit"
        rate = f"{found.slice_tokens_per_s:10.0f}" if plan.deployment.fits else f"{'-':>10}"
        text.append(
            f"{'':4}{plan.target.name:<14}{plan.target.num_chips:>6}{plan.num_copies:>8}{rate}{usd:>14}  {state}"
        )
    best = cheapest(assessments)
    if best is None:
        fitting = any(found.plan.deployment.fits for found in assessments)
        text.append("cheapest: unknown without --price" if fitting else "cheapest: no target fits")
    elif best.service is not None and best.service.usd_per_hour is not None:
        text.append(f"cheapest: {best.plan.target.name}, {best.service.usd_per_hour:.2f} USD per hour for the load")
    else:
        text.append(f"cheapest: {best.plan.target.name}, {best.usd_per_million:.3f} USD per million output tokens")
    if workload.tokens_per_s is not None:
        text.append(
            f"a load may use {MAX_LOAD:.0%} of the estimated tokens/s; a larger load requires more whole slices"
        )
    return text


def as_json(found: Assessment) -> dict[str, Any]:
    """Return all numbers of one target."""
    plan, deployment = found.plan, found.plan.deployment
    memory = deployment.memory
    return {
        "model": plan.model,
        "topology": plan.target.name,
        "fits": deployment.fits,
        "problem": deployment.problem,
        "compiler_refusal": None if deployment.refusal is None else deployment.refusal.message,
        "compiler_needs_bytes": None if deployment.refusal is None else deployment.refusal.needs_bytes,
        "num_chips": plan.target.num_chips,
        "num_devices": plan.target.num_devices,
        "tensor_parallel_size": plan.num_devices // (plan.num_context_parts * plan.num_stages),
        "context_parallel_size": plan.num_context_parts,
        "pipeline_parallel_size": plan.num_stages,
        "num_copies": plan.num_copies,
        "dtype": plan.dtype,
        "kv_cache_dtype": plan.kv_dtype,
        "attention_backend": deployment.backend,
        "passed_over_backends": list(deployment.passed_over),
        "max_model_len": deployment.geometry.max_model_len,
        "max_num_seqs": deployment.geometry.max_num_seqs,
        "max_num_batched_tokens": deployment.geometry.max_num_batched_tokens,
        "block_size": deployment.geometry.block_size,
        "windows": list(deployment.geometry.windows),
        "num_blocks": deployment.num_blocks,
        "most_blocks": deployment.most_blocks,
        "notes": list(plan.notes),
        "memory_of_one_device": {
            "total_bytes": memory.total_bytes,
            "usable_bytes": memory.usable_bytes,
            "weight_bytes": memory.request.weight_bytes,
            "adapter_bytes": deployment.adapter_bytes,
            "pool_bytes": memory.pool_bytes,
            "bytes_per_block": memory.request.bytes_per_block,
            "programs": None if memory.programs is None else dataclasses.asdict(memory.programs),
            "free_bytes": memory.free_bytes,
            "outside_allocator_bytes": memory.outside_bytes,
        },
        "estimates": [_estimate_json(one) for one in found.estimates],
        "assumptions": plan.step_times.assumptions(deployment.geometry.max_num_seqs),
        "slice_tokens_per_s": found.slice_tokens_per_s,
        "price_per_chip_hour": found.price,
        "usd_per_million_output_tokens": found.usd_per_million,
        "service": None if found.service is None else dataclasses.asdict(found.service),
        "roles": None if found.roles is None else _roles_json(found.roles),
        "num_programs": deployment.num_programs,
        "compiled_programs": [dataclasses.asdict(program) for program in deployment.programs],
        "compile_seconds": round(deployment.seconds, 1),
        "estimated_start": None if deployment.start is None else dataclasses.asdict(deployment.start),
        "bytes_of_a_summed_number": deployment.number_bytes,
        "overlapped_sums": {
            str(num_tokens): [dataclasses.asdict(one) for one in sums] for num_tokens, sums in deployment.sums.items()
        },
        "versions": dict(plan.versions),
    }


def _roles_json(roles: RoleComparison) -> dict[str, Any]:
    values = {**dataclasses.asdict(roles), "choose": "apart" if roles.chooses_apart else "both"}
    for way in ("mixed", "apart"):  # JSON has no infinity
        values[way] = {name: None if value == math.inf else value for name, value in values[way].items()}
    return values


def _estimate_json(one: Estimate) -> dict[str, Any]:
    values = dataclasses.asdict(one)
    seconds = {"decode_s": one.decode.seconds, "prefill_s": one.prefill.seconds}
    return {**values.pop("lengths"), **values, **seconds}


def _by_how_much(found: Assessment) -> str:
    deployment = found.plan.deployment
    free = deployment.memory.free_bytes or 0
    if deployment.fits:
        return f", {max(0, free) / _GIB:.3f} GiB per device free after a pool of {deployment.num_blocks} blocks"
    if free < 0:
        return f", over by {-free / _GIB:.2f} GiB per device"
    return ""


def _estimate_lines(found: Assessment) -> list[str]:
    text = []
    for one in found.estimates:
        tokens_per_s = one.tokens_per_s * found.plan.num_copies
        cost = None if found.price is None else usd_per_million(found.price, found.plan.target.num_chips, tokens_per_s)
        text.append(
            f"{one.num_fitting} of {one.lengths.input_len} + {one.lengths.output_len} tokens: {one.num_running} run "
            f"concurrently, a decode step {one.decode.seconds * 1e3:.2f} ms, a prefill step "
            f"{one.prefill.seconds * 1e3:.2f} ms, {tokens_per_s:.0f} output tokens/s"
            + ("" if cost is None else f", {cost:.3f} USD per million")
        )
        text += [f"  decode, ms: {one.decode}", f"  prefill, ms: {one.prefill}"]
    return text


def _service(service: PlannedService, plan: CompiledPlan) -> str:
    cost = "" if service.usd_per_hour is None else f", {service.usd_per_hour:.2f} USD per hour"
    copies = _counted(service.num_slices * plan.num_copies, "copy", "copies")
    return f"{service.num_slices} x {plan.target.name} ({_counted(service.num_chips, 'chip', 'chips')}, {copies}{cost})"


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
