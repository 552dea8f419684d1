"""The training loops that use an `LLM` as their sampler."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.rl.distill import distill
from benchmarks.rl.grpo import (
    Batch,
    Settings,
    attend,
    grpo_loss,
    normalize,
    open_sampler,
    reward,
    token_logprobs,
    train,
)
from jpaged import LLM
from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.weights import load_params, params_from_arrays
from jpaged.errors import InvalidArgument
from jpaged.models.model import Model
from tests.e2e.rig import write_model

SMALL = Settings(num_prompts=2, group_size=3, max_tokens=8, row_len=24, kl_weight=0.1)


def test_the_reward_counts_short_sentences_about_the_subject() -> None:
    assert reward("A fox ran. It was red! Why?", "fox") == 2 / 8
    assert reward("It was red. He had fun.", "fox") == 0
    assert reward("The fox was here. " * 20, "fox") == 1


def test_advantages_are_normalized_in_each_group() -> None:
    advantages = normalize(np.array([[0.0, 1.0], [0.5, 0.5]]))
    np.testing.assert_allclose(advantages, [[-1, 1], [0, 0]], atol=1e-3)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", ["llama_gqa_bias", "llama3_tied"])
@pytest.mark.parametrize("layer_mode", ["scan", "loop"])
def test_arrays_by_name_become_the_tree_that_is_loaded(tmp_path: Path, name: str, layer_mode: str) -> None:
    folder = write_model(name, tmp_path / "model")
    model = Model(read_config(folder), np.dtype("float32"))
    arrays = {name: jnp.asarray(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    if model.config.tie_word_embeddings:
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]  # as a trainer may have it
    got = jax.jit(functools.partial(params_from_arrays, model, layer_mode=layer_mode))(arrays)
    jax.tree.map(np.testing.assert_array_equal, got, load_params(model, folder, layer_mode))  # type: ignore[arg-type]


def test_arrays_that_are_not_of_the_model_are_refused(tmp_path: Path) -> None:
    folder = write_model("llama_mha", tmp_path / "model")
    model = Model(read_config(folder), np.dtype("float32"))
    arrays = {name: jnp.asarray(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    norm = "model.norm.weight"
    for changed, problem in (
        ({name: array for name, array in arrays.items() if name != norm}, f"{norm} is missing"),
        ({**arrays, "other": arrays[norm]}, "other is not part of LlamaForCausalLM"),
        ({**arrays, norm: arrays[norm][1:]}, f"{norm} has shape"),
    ):
        with pytest.raises(InvalidArgument, match=problem):
            params_from_arrays(model, changed)


@pytest.mark.long
def test_the_gradient_of_equal_policies_is_that_of_the_log_probabilities(tmp_path: Path) -> None:
    folder = write_model("llama_mha", tmp_path / "model")
    model = Model(read_config(folder), np.dtype("float32"))
    weights = {name: jnp.asarray(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    ids = jnp.asarray(np.random.default_rng(0).integers(3, 131, (2, 6)), jnp.int32)
    is_sampled = jnp.arange(6)[None] >= jnp.array([[2], [3]])
    advantages = jnp.broadcast_to(jnp.array([[1.0], [-2.0]]), (2, 6))
    old = token_logprobs(model, weights, ids)
    batch = Batch(ids, is_sampled, old, advantages)
    wanted = jax.grad(lambda w: -(token_logprobs(model, w, ids) * advantages * is_sampled).sum() / is_sampled.sum())
    got = jax.grad(lambda w: grpo_loss(model, SMALL, w, weights, batch)[0])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got(weights), wanted(weights))
    far = batch._replace(old_logprobs_bt=old - advantages)  # both ratios are beyond the clipped range
    unweighted = Settings()
    flat = jax.grad(lambda w: grpo_loss(model, unweighted, w, weights, far)[0])(weights)
    assert all(not np.asarray(leaf).any() for leaf in flat.values())


@pytest.mark.long
def test_attention_sees_only_its_row_and_earlier_tokens() -> None:
    q, k, v = (jax.random.normal(jax.random.key(n), (6, heads, 4)) for n, heads in enumerate((4, 2, 2)))
    whole, _ = attend((2, 3), q, k, v, (), None)
    alone, _ = attend((1, 2), q[3:5], k[3:5], v[3:5], (), None)
    np.testing.assert_allclose(whole[3:5], alone, atol=1e-6)


@pytest.mark.long
def test_two_runs_give_identical_numbers_and_old_log_probabilities_are_the_trainers() -> None:
    with open_sampler() as llm:
        runs = [[(*step.measured.items(), step.text) for step in train(llm, SMALL, 3, seed=1)] for _ in range(2)]
        steps = [*train(llm, SMALL, 3, seed=2)]
        assert llm.weight_version == "2-3"
    assert runs[0] == runs[1]
    assert [step.text for step in steps] != [run[-1] for run in runs[0]]
    assert max(step.measured["max_ratio_error"] for step in steps) < 1e-4
    assert steps[0].measured["kl"] == pytest.approx(0, abs=1e-6) and steps[2].measured["kl"] > 0


@pytest.mark.long
def test_the_reward_rises() -> None:
    settings = Settings(num_prompts=4, group_size=8, max_tokens=16, row_len=32, learning_rate=1e-3)
    with open_sampler() as llm:
        rewards = [step.measured["reward"] for step in train(llm, settings, 24, seed=0)]
    assert np.mean(rewards[-6:]) > np.mean(rewards[:6]) + 0.05


@pytest.mark.long
def test_the_student_comes_nearer_to_its_teacher() -> None:
    sizes: dict[str, Any] = {"dtype": "float32", "linear_backend": "xla", "max_num_seqs": 32, "max_model_len": 64}
    with LLM("demo", **sizes) as teacher, LLM("demo-draft", **sizes) as student:
        divergences = [*distill(teacher, student, 16, seed=0)]
    assert np.mean(divergences[-4:]) < np.mean(divergences[:4]) - 0.1
