"""GRPO on the demo model: `python -m benchmarks.rl.grpo --steps 200 --seed 0`.

The model learns to tell its stories in short sentences. Each step:

    prompts | LLM.generate: a group of samples each | reward, advantage in the group | gradient | LLM.update_weights

The sampler and the trainer compute with the same arrays: the weights are a dictionary by Hugging Face's names, which
optax updates and `update_weights` takes as it is. Old log-probabilities are those that the engine returns with its
samples.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file

from jpaged import LLM, SamplingParams
from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.weights import params_from_arrays
from jpaged.demo import FOLDER
from jpaged.models.model import Model
from jpaged.models.tokens import TokenBatch
from jpaged.types import RequestOutput

SUBJECTS = ("dragon", "fox", "robot", "king", "bear", "rabbit", "owl", "pirate", "wizard", "cat", "turtle", "giant")
Weights = dict[str, jax.Array]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run depends on, next to its seed."""

    num_prompts: int = 4
    group_size: int = 8
    max_tokens: int = 40
    row_len: int = 56
    learning_rate: float = 2e-4
    clip: float = 0.2
    kl_weight: float = 0.0
    max_norm: float = 1.0


class Step(NamedTuple):
    """A finished step: its mean reward and what the trainer measured, seconds of sampling, training and the update."""

    number: int
    measured: dict[str, float]
    times_s: list[float]
    text: str


class Batch(NamedTuple):
    """Samples of one step, one a row: the prompt, the sampled tokens and padding."""

    ids_bt: jax.Array
    is_sampled_bt: jax.Array
    old_logprobs_bt: jax.Array
    advantages_bt: jax.Array


def reward(text: str, subject: str) -> float:
    """Return the number of sentences of 3 to 8 words, out of 8; nothing without the subject."""
    sentences = re.findall(r"[^.!?]+[.!?]", text)
    num_short = sum(3 <= len(sentence.split()) <= 8 for sentence in sentences)
    return min(num_short, 8) / 8 if subject in text else 0.0


# --- the trainer ------------------------------------------------------------------------------------------------------


def attend(shape: tuple[int, ...], q: jax.Array, k: jax.Array, v: jax.Array, carry: Any, place: Any) -> Any:
    """Compute causal attention for rows that are packed in one axis, as `Model.run` calls it."""
    q, k, v = (x.reshape(*shape, *x.shape[1:]) for x in (q, k, v))
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return out.reshape(shape[0] * shape[1], *out.shape[2:]), carry


def token_logprobs(model: Model, weights: Weights, ids_bt: jax.Array) -> jax.Array:
    """Return the log-probability of each token after those before it in its row; 0 for the first."""
    num_rows, row_len = ids_bt.shape
    positions = jnp.tile(jnp.arange(row_len, dtype=jnp.int32), num_rows)
    tokens = TokenBatch(ids_bt.reshape(-1), positions, jnp.full_like(positions, row_len))
    params = params_from_arrays(model, weights)
    hidden, _ = model.run(params, tokens, partial(attend, ids_bt.shape), (), "loop")
    logprobs = jax.nn.log_softmax(model.logits(params, hidden)).reshape(num_rows, row_len, -1)
    of_next = jnp.take_along_axis(logprobs[:, :-1], ids_bt[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(of_next, ((0, 0), (1, 0)))


def grpo_loss(
    model: Model, settings: Settings, weights: Weights, reference: Weights, batch: Batch
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the clipped objective with a penalty on the divergence from the reference, a mean over sampled tokens."""
    logprobs = token_logprobs(model, weights, batch.ids_bt)
    ratio = jnp.exp(jnp.where(batch.is_sampled_bt, logprobs - batch.old_logprobs_bt, 0.0))
    clipped = jnp.clip(ratio, 1 - settings.clip, 1 + settings.clip)
    gain = jnp.minimum(ratio * batch.advantages_bt, clipped * batch.advantages_bt)

    def mean(values_bt: jax.Array) -> jax.Array:
        return jnp.where(batch.is_sampled_bt, values_bt, 0.0).sum() / batch.is_sampled_bt.sum()

    loss, measured = -mean(gain), {"max_ratio_error": jnp.abs(ratio - 1).max()}
    if settings.kl_weight:
        drift = jax.lax.stop_gradient(token_logprobs(model, reference, batch.ids_bt)) - logprobs
        measured["kl"] = mean(jnp.exp(drift) - drift - 1)  # an unbiased estimate that is never negative
        loss += settings.kl_weight * measured["kl"]
    return loss, measured


class Trainer:
    """Weights by Hugging Face's names, and their optimizer."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        model = Model(read_config(folder), np.dtype("float32"))
        tensors = load_file(folder / "model.safetensors")
        self.weights: Weights = {name: jnp.asarray(tensor, jnp.float32) for name, tensor in tensors.items()}
        reference = self.weights
        optimizer = optax.chain(optax.clip_by_global_norm(settings.max_norm), optax.adamw(settings.learning_rate))
        self._state = optimizer.init(self.weights)

        @jax.jit
        def step(weights: Weights, state: optax.OptState, batch: Batch) -> Any:
            compute = jax.value_and_grad(partial(grpo_loss, model, settings), has_aux=True)
            (loss, measured), gradients = compute(weights, reference, batch)
            updates, state = optimizer.update(gradients, state, weights)
            return optax.apply_updates(weights, updates), state, {"loss": loss, **measured}

        self._step = step

    def step(self, batch: Batch) -> dict[str, float]:
        """Update the weights once; return what was measured."""
        self.weights, self._state, measured = self._step(self.weights, self._state, batch)
        return {name: float(value) for name, value in measured.items()}


# --- the loop ---------------------------------------------------------------------------------------------------------


def normalize(rewards_gn: np.ndarray) -> np.ndarray:
    """Return the advantage of each sample in its group."""
    deviations = rewards_gn - rewards_gn.mean(axis=1, keepdims=True)
    return deviations / (rewards_gn.std(axis=1, keepdims=True) + 1e-4)


def make_batch(groups: Sequence[RequestOutput], advantages_gn: np.ndarray, row_len: int) -> Batch:
    """Return the samples of all groups as rows, with the engine's log-probabilities."""
    ids = np.zeros((advantages_gn.size, row_len), np.int32)
    is_sampled, old = np.zeros(ids.shape, bool), np.zeros(ids.shape, np.float32)
    for row, (group, output) in enumerate((one, output) for one in groups for output in one.outputs):
        assert output.logprobs is not None
        begin = len(group.prompt_token_ids)
        end = begin + len(output.token_ids)
        ids[row, :end] = [*group.prompt_token_ids, *output.token_ids]
        is_sampled[row, begin:end] = True
        old[row, begin:end] = [position.chosen.logprob for position in output.logprobs]
    advantages = np.broadcast_to(advantages_gn.reshape(-1, 1), ids.shape).astype(np.float32)
    return Batch(*map(jnp.asarray, (ids, is_sampled, old, advantages)))


def sample(llm: LLM, settings: Settings, rng: np.random.Generator) -> tuple[list[RequestOutput], np.ndarray]:
    """Return a group of samples for each of some prompts, and their rewards `[groups, samples]`."""
    subjects = [str(one) for one in rng.choice(SUBJECTS, settings.num_prompts, replace=False)]
    params = [
        SamplingParams(
            n=settings.group_size, temperature=1.0, max_tokens=settings.max_tokens, logprobs=0, seed=int(seed)
        )
        for seed in rng.integers(2**31, size=len(subjects))
    ]
    prompts = [f"<|user|>Tell me a story about a {subject}.<|assistant|>" for subject in subjects]
    groups = llm.generate(prompts, params, use_tqdm=False)
    named = zip(groups, subjects, strict=True)
    return groups, np.array([[reward(one.text, subject) for one in group.outputs] for group, subject in named])


def open_sampler() -> LLM:
    """Return the demo model in float32, with matrix products of XLA: updates copy nothing to the host."""
    return LLM("demo", dtype="float32", linear_backend="xla", max_num_seqs=32, max_model_len=64)


def train(llm: LLM, settings: Settings, num_steps: int, seed: int) -> Iterator[Step]:
    """Train from the packaged weights; yield what each step measured."""
    trainer, rng = Trainer(FOLDER, settings), np.random.default_rng(seed)
    llm.update_weights(trainer.weights, version=f"{seed}-0")
    for step in range(1, num_steps + 1):
        times = [time.perf_counter()]
        groups, rewards = sample(llm, settings, rng)
        times.append(time.perf_counter())
        measured = trainer.step(make_batch(groups, normalize(rewards), settings.row_len))
        times.append(time.perf_counter())
        llm.update_weights(trainer.weights, version=f"{seed}-{step}")
        times.append(time.perf_counter())
        yield Step(step, {"reward": float(rewards.mean()), **measured}, [*np.diff(times)], groups[0].outputs[0].text)


def main() -> None:
    """Train once, and print each step."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rl.grpo", description="GRPO on the demo model.")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and samples (default: 0)")
    parser.add_argument("--kl", type=float, default=0.0, help="weight of the divergence from the start (default: 0)")
    args = parser.parse_args()
    with open_sampler() as llm:
        for step in train(llm, Settings(kl_weight=args.kl), args.steps, args.seed):
            numbers = "  ".join(f"{name} {value:.4g}" for name, value in step.measured.items())
            print(f"step {step.number}  {numbers}  {sum(step.times_s):.2f} s  {step.text[:60]!r}", flush=True)


if __name__ == "__main__":
    main()
