"""Rollouts of reinforcement learning: agreement of sampler and trainer, and groups of samples.

python -m benchmarks.rollouts

The trainer's forward is the model under `jax.grad`, on whole sequences without a cache, with XLA's matmuls. The engine
computes each sequence twice: token by token while it samples, and as a prompt.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.demo_model.attention import attend
from benchmarks.record import save
from jpaged.checkpoints.weights import load_params
from jpaged.demo import FOLDER
from jpaged.llm import LLM, TokensPrompt
from jpaged.models.hf_config import from_hf
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.models.tokens import TokenBatch
from jpaged.types import SamplingParams

CASES = (("float32", "cpu"), ("float32", "xla"), ("bfloat16", "cpu"))
"""Types and backends. XLA's matmuls in bfloat16 are too slow on CPUs to serve with them."""
GROUP_SIZE = 16
NUM_TURNS = 3

Trainer = Callable[[Sequence[int], Sequence[float]], np.ndarray]


def make_trainer(folder: Path, dtype: str) -> tuple[Trainer, Trainer]:
    """The log-probabilities of a sequence's tokens in a step with gradients, without and with those of the sampler."""
    model = Model(from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8"))), np.dtype(dtype))
    params = load_params(model, folder, "loop")

    def compute_logprobs(params: Params, ids_t: jax.Array) -> jax.Array:
        positions = jnp.arange(len(ids_t), dtype=jnp.int32)
        mask_1tt = (positions[:, None] <= positions)[None]  # key s, query t
        see = functools.partial(attend, mask_1tt)
        hidden_te, _ = model.run(params, TokenBatch(ids_t, positions, positions + 1), see, (), "loop")
        logits_tv = model.logits(params, hidden_te)[:-1]
        chosen_t = jnp.take_along_axis(logits_tv, ids_t[1:, None], axis=1)[:, 0]
        return chosen_t - jax.nn.logsumexp(logits_tv, axis=-1)

    @functools.partial(jax.jit, static_argnames="is_tied")
    def step(params: Params, ids_t: jax.Array, sampled_n: jax.Array, is_tied: bool) -> tuple[Params, jax.Array]:
        def compute_loss(params: Params) -> tuple[jax.Array, jax.Array]:
            own_n = compute_logprobs(params, ids_t)[-len(sampled_n) :]
            if is_tied:
                own_n = sampled_n + (own_n - jax.lax.stop_gradient(own_n))
            return -jnp.exp(own_n - sampled_n).sum(), own_n

        return jax.grad(compute_loss, has_aux=True)(params)

    def run(is_tied: bool, token_ids: Sequence[int], sampled: Sequence[float]) -> np.ndarray:
        slopes, own_n = step(params, np.array(token_ids, np.int32), np.array(sampled, np.float32), is_tied)
        if not all(np.isfinite(slope).all() for slope in jax.tree.leaves(slopes)):
            raise FloatingPointError("a gradient is not finite")
        return np.asarray(own_n)

    return functools.partial(run, False), functools.partial(run, True)


def compare(
    llm: LLM, trainers: tuple[Trainer, Trainer], prompts: Sequence[list[int]], num_tokens: int
) -> dict[str, float]:
    """Differences of the log-probabilities of sampled tokens, and the range of importance weights."""
    params = SamplingParams(seed=1, n=2, max_tokens=num_tokens, ignore_eos=True, sampling_logprobs=True)
    sampled, scored, own, tied = (list[np.ndarray]() for _ in range(4))
    for output in llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params):
        for one in output.outputs:
            assert one.logprobs is not None
            sampled.append(np.array([position.sampling_logprob for position in one.logprobs], np.float32))
            token_ids = [*output.prompt_token_ids, *one.token_ids]
            whole = SamplingParams(max_tokens=1, prompt_logprobs=0, sampling_logprobs=True, use_prefix_cache=False)
            (again,) = llm.generate([TokensPrompt(prompt_token_ids=token_ids)], whole)
            told = (again.prompt_logprobs or ())[-num_tokens:]
            scored.append(np.array([position.chosen.logprob for position in told if position is not None], np.float32))
            for found, trainer in zip((own, tied), trainers, strict=True):
                found.append(trainer(token_ids, sampled[-1].tolist()))
    s, p, t, e = (np.concatenate(parts) for parts in (sampled, scored, own, tied))
    return {
        "num_tokens": len(s),
        "prompt_equal_share": float((s == p).mean()),
        "prompt_max_difference": float(np.abs(s - p).max()),
        "trainer_equal_share": float((s == t).mean()),
        "trainer_max_difference": float(np.abs(s - t).max()),
        "prompt_weight_min": float(np.exp(p - s).min()),
        "prompt_weight_max": float(np.exp(p - s).max()),
        "trainer_weight_min": float(np.exp(t - s).min()),
        "trainer_weight_max": float(np.exp(t - s).max()),
        "tied_weight_min": float(np.exp(e - s).min()),
        "tied_weight_max": float(np.exp(e - s).max()),
    }


def measure_groups(llm: LLM, prompt_len: int, num_tokens: int) -> dict[str, float]:
    """Samples per second of a group, and of as many requests of its prompt, with and without the prefix cache."""
    rates: dict[str, list[float]] = {"group": [], "requests": [], "separate": []}
    for turn in range(NUM_TURNS + 1):
        for way, found in rates.items():
            prompt = np.random.default_rng(turn * 3 + len(way)).integers(3, 2000, prompt_len).tolist()
            fields: dict[str, Any] = {
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "use_prefix_cache": way != "separate",
            }
            num_requests = 1 if way == "group" else GROUP_SIZE
            params = [SamplingParams(n=GROUP_SIZE // num_requests, seed=i, **fields) for i in range(num_requests)]
            begin = time.perf_counter()
            llm.generate([TokensPrompt(prompt_token_ids=prompt)] * num_requests, params)
            if turn:  # the first one touches memory for the first time
                found.append(GROUP_SIZE / (time.perf_counter() - begin))
    return {"prompt_len": prompt_len, **{way: statistics.median(found) for way, found in rates.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollouts",
        description="measure agreement of trainer and engine, and groups of samples",
    )
    parser.add_argument("--num-tokens", type=int, default=32, help="tokens of a sample (default: 32)")
    parser.add_argument("--prompt-len", type=int, nargs="+", default=[32, 256], help="of groups (default: 32 256)")
    arguments = parser.parse_args()
    prompts = [np.random.default_rng(i).integers(3, 2000, 9 + 3 * i).tolist() for i in range(4)]
    agreement = []
    for dtype, backend in CASES:
        options: dict[str, Any] = {"linear_backend": backend, "attention_backend": backend}
        with LLM("demo", dtype=dtype, max_num_seqs=8, **options) as llm:
            found = compare(llm, make_trainer(FOLDER, dtype), prompts, arguments.num_tokens)
        agreement.append({"dtype": dtype, "backend": backend, **found})
        Console().print(agreement[-1])
    facts = {"num_cpus_used": len(os.sched_getaffinity(0)), "num_tokens": arguments.num_tokens, "turns": NUM_TURNS}
    save("rollouts", "python -m benchmarks.rollouts", {**facts, "agreement": agreement})
    with LLM("demo", max_num_seqs=GROUP_SIZE) as llm:
        groups = [measure_groups(llm, length, arguments.num_tokens) for length in arguments.prompt_len]
    table = Table(title=f"samples per second, groups of {GROUP_SIZE}", title_justify="left")
    for title in groups[0]:
        table.add_column(title, justify="right")
    for row in groups:
        table.add_row(*(f"{value:.1f}" for value in row.values()))
    Console().print(table)
    print(save("rollouts", "python -m benchmarks.rollouts", {**facts, "agreement": agreement, "groups": groups}))


if __name__ == "__main__":
    main()
