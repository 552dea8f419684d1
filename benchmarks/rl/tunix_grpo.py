"""GRPO by tunix with jpaged as its sampler: `make tunix`, or `python -m benchmarks.rl.tunix_grpo` with google-tunix.

Trains the demo model for some steps and prints one JSON line: the largest difference between log-probabilities of the
engine and of tunix's own forward for the same tokens, before and after training.
"""

from __future__ import annotations

import argparse
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from transformers import AutoTokenizer
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks.rl.grpo import SUBJECTS, reward
from jpaged.checkpoints.hub import read_config
from jpaged.demo import FOLDER
from jpaged.tunix import JpagedRollout

ROPE_THETA = 1_000_000
"""Rotary base of tunix's Llama in 0.1.7, which does not read the one of its config. The engine has the same."""
ROLLOUT = RolloutConfig(
    max_tokens_to_generate=40, max_prompt_length=16, kv_cache_size=64, temperature=1.0, return_logprobs=True
)


def load_actor(mesh: jax.sharding.Mesh) -> Any:
    """Return the demo model as tunix's Llama 3."""
    config = read_config(FOLDER)
    shape = llama.ModelConfig(
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        embed_dim=256,
        hidden_dim=640,
        num_heads=8,
        head_dim=32,
        num_kv_heads=4,
        rope_theta=ROPE_THETA,
        norm_eps=1e-5,
        weight_tying=True,
    )
    return llama_params.create_model_from_safe_tensors(str(FOLDER), shape, mesh, dtype=jnp.float32)


def compare(cluster: Any) -> dict[str, float]:
    """Return how far the engine's log-probabilities are from those of tunix's forward, for new samples."""
    prompts = [f"<|user|>Tell me a story about a {subject}.<|assistant|>" for subject in SUBJECTS[:4]]
    output = cluster.generate(prompts)
    tokens = np.full((4, ROLLOUT.max_tokens_to_generate), cluster.rollout.pad_id(), np.int32)
    for row, sampled in zip(tokens, output.tokens, strict=True):
        row[: len(sampled)] = sampled
    given = jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(tokens)
    scored = np.asarray(cluster.get_old_per_token_logps(*given))
    theirs = cluster.get_actor_per_token_logps(*given, cluster.rollout.pad_id(), cluster.rollout.eos_id())
    lengths = [len(one) for one in output.tokens]
    of_samples = [one[:n] - np.asarray(row)[:n] for one, row, n in zip(output.logprobs, theirs, lengths, strict=True)]
    of_scores = [one[:n] - np.asarray(row)[:n] for one, row, n in zip(scored, theirs, lengths, strict=True)]
    return {
        "sampled": float(np.abs(np.concatenate(of_samples)).max()),
        "scored": float(np.abs(np.concatenate(of_scores)).max()),
    }


def train(num_steps: int) -> dict[str, Any]:
    """Train, and return the comparison before and after, with the mean reward of each step."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    tokenizer, roles = AutoTokenizer.from_pretrained(str(FOLDER)), rl_cluster.Role
    cluster = rl_cluster.RLCluster(
        actor=load_actor(mesh),
        reference=load_actor(mesh),
        tokenizer=tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={roles.ACTOR: mesh, roles.REFERENCE: mesh, roles.ROLLOUT: mesh},
            rollout_engine=functools.partial(
                JpagedRollout,
                model="demo",
                dtype="float32",
                linear_backend="xla",
                max_num_seqs=16,
                hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA}},
            ),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-4), eval_every_n_steps=10_000, max_steps=num_steps
            ),
            rollout_config=ROLLOUT,
        ),
    )
    rewards: list[float] = []

    def score(prompts: list[str], completions: list[str], **unused: Any) -> list[float]:
        subjects = [prompt.split("about a ")[1].split(".")[0] for prompt in prompts]
        found = [reward(text, subject) for text, subject in zip(completions, subjects, strict=True)]
        rewards.append(float(np.mean(found)))
        return found

    before = compare(cluster)
    learner = GRPOLearner(cluster, algo_config=GRPOConfig(num_generations=4, beta=0.04), reward_fns=score)
    picked = np.random.default_rng(0).choice(SUBJECTS, (num_steps, 4))
    prompts = [np.array([f"<|user|>Tell me a story about a {one}.<|assistant|>" for one in row]) for row in picked]
    learner.train([{"prompts": row} for row in prompts])
    result = {
        "steps": cluster.global_steps,
        "rewards": rewards,
        "version": cluster.rollout.llm.weight_version,
        "max_difference_before": before,
        "max_difference_after": compare(cluster),
    }
    changed = nnx.state(cluster.actor_trainer.model, nnx.Param)
    result["has_changed"] = not np.array_equal(
        *(jax.tree.leaves(one)[0] for one in (changed, nnx.state(load_actor(mesh))))
    )
    cluster.rollout.llm.close()
    return result


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rl.tunix_grpo", description="GRPO by tunix.")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (default: 3)")
    print(json.dumps(train(parser.parse_args().steps)))


if __name__ == "__main__":
    main()
