"""Sampling on TPUs as one call: the kernel's inputs and outputs, and the operations of XLA around it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from jpaged.kernels.sampling.rows import SMALLEST, RowSampling, SampledTokens, row_keys
from jpaged.kernels.sampling.tpu import kernel

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

_VMEM_BYTES = 48 * 2**20  # of 64 MiB, the least of the generations since v5e
_VMEM_BUDGET_BYTES = 44 * 2**20  # the rest is left to the compiler
_REACHABLE = 1e-4  # minimum share that top_p excludes; below that rounding would matter


@dataclass(frozen=True, slots=True)
class TpuSampling:
    """The kernel, for all columns on one device. See `jpaged.kernels.sampling.SamplingKernel`."""

    def sample(
        self, logits_rv: Float[Array, "R V"], how: RowSampling, *, has_logprobs: bool, num_top: int = 0
    ) -> SampledTokens:
        """Sample a token per row."""
        num_rows, vocab_size = logits_rv.shape
        plan = choose_plan(vocab_size, has_logprobs=has_logprobs)
        if isinstance(plan, str):
            raise ValueError(plan)
        padding = -num_rows % kernel.ROWS
        is_used_rx = (how.banned_token_ids_rx >= 0) & (how.banned_token_ids_rx < vocab_size)
        num_banned_r = jnp.max(jnp.where(is_used_rx, jnp.arange(1, is_used_rx.shape[1] + 1), 0), axis=1)
        scalars = kernel.SamplingScalars(
            flags=_flags(how, vocab_size),
            num_banned=jnp.pad(num_banned_r.astype(jnp.int32), (0, padding)),
            banned=jnp.pad(how.banned_token_ids_rx.astype(jnp.int32), ((0, padding), (0, 0))).reshape(-1),
        )
        fields_rf = jnp.pad(_fields(how, vocab_size), ((0, padding), (0, 0)))
        results = kernel.call(scalars, fields_rf, logits_rv, plan)
        told = {name: results[:num_rows, i] for i, name in enumerate(kernel.RESULTS)}
        token_ids_r = told["token"]
        chosen_r = jnp.take_along_axis(logits_rv, token_ids_r[:, None], axis=1, mode="clip")[:, 0]
        is_banned_r = jnp.any(is_used_rx & (how.banned_token_ids_rx == token_ids_r[:, None]), axis=1)
        is_sound_r = (told["num_unsound"] == 0) & jnp.isfinite(chosen_r) & ~is_banned_r
        sampled = SampledTokens(token_ids_r, is_sound_r)
        if not has_logprobs:
            return sampled
        logprobs_r, log_totals_r = (
            lax.bitcast_convert_type(told[name], jnp.float32) for name in ("logprob", "log_total")
        )
        sampled = dataclasses.replace(sampled, logprobs_r=logprobs_r, ranks_r=told["rank"])
        if num_top == 0:
            return sampled
        top_rk, top_ids_rk = lax.top_k(logits_rv, num_top)
        return dataclasses.replace(sampled, top_ids_rk=top_ids_rk, top_logprobs_rk=top_rk - log_totals_r[:, None])


def choose_plan(vocab_size: int, *, has_logprobs: bool) -> kernel.SamplingPlan | str:
    """Return the plan of a call, or why there is none."""
    plan = kernel.SamplingPlan(vocab_size, has_logprobs, _VMEM_BYTES)
    if plan.vmem_bytes > _VMEM_BUDGET_BYTES:
        need, budget = plan.vmem_bytes >> 20, _VMEM_BUDGET_BYTES >> 20
        return f"8 rows of a vocabulary of {vocab_size} require {need} MiB of vector memory; the limit is {budget} MiB"
    return plan


def unsupported_reason(vocab_size: int) -> str | None:
    """Return why there is no kernel for it, or None."""
    plan = choose_plan(vocab_size, has_logprobs=True)
    return plan if isinstance(plan, str) else None


def _flags(how: RowSampling, vocab_size: int) -> Int[Array, "G"]:
    """Return the flags of each group of rows."""
    asked = (
        (kernel.SAMPLES, how.temperature_r > 0),
        (kernel.TRUNCATES_COUNT, how.top_k_r < vocab_size),
        (kernel.TRUNCATES_SHARE, how.top_p_r < 1),
    )
    is_sampled_r = how.temperature_r > 0
    padding = -len(is_sampled_r) % kernel.ROWS
    flags_g = jnp.zeros((len(is_sampled_r) + padding) // kernel.ROWS, jnp.int32)
    for bit, is_asked_r in asked:
        is_asked_gr = jnp.pad(is_sampled_r & is_asked_r, (0, padding)).reshape(-1, kernel.ROWS)
        flags_g |= jnp.where(is_asked_gr.any(axis=1), bit, 0)
    return flags_g


def _fields(how: RowSampling, vocab_size: int) -> Int[Array, "R 128"]:
    """Return `kernel.FIELDS` of each row, as bits. A greedy row keeps all tokens: its floor is its largest logit."""
    is_greedy_r = how.temperature_r == 0
    left_out_r = 1 - how.top_p_r
    # All tokens further below together weigh less than the share that top_p excludes; the margin is a factor of e.
    reach_r = jnp.where(left_out_r >= _REACHABLE, jnp.log(vocab_size / left_out_r) + 1, jnp.inf)
    key_high_r1, key_low_r1 = row_keys(how.seeds_r2, how.sequence_indices_r, how.positions_r)
    fields = {
        "temperature": jnp.where(is_greedy_r, 1, jnp.maximum(how.temperature_r, SMALLEST)),
        "is_greedy": is_greedy_r.astype(jnp.int32),
        "top_k": jnp.where(is_greedy_r, vocab_size, how.top_k_r),
        "top_p": jnp.where(is_greedy_r, 1, jnp.maximum(how.top_p_r, SMALLEST)),
        "reach": reach_r,
        "log_min_p": jnp.log(how.min_p_r),
        "key_high": key_high_r1[:, 0],
        "key_low": key_low_r1[:, 0],
    }
    columns = [lax.bitcast_convert_type(fields[name], jnp.int32) for name in kernel.FIELDS]
    return jnp.pad(jnp.stack(columns, axis=1), ((0, 0), (0, kernel.LANES - len(columns))))
