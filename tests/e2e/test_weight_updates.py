"""New weights in a running model: tokens and bits are those of a model that was loaded with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpaged import LLM, SamplingParams
from jpaged.device.executor import JaxExecutor
from tests.e2e.rig import chosen_logprobs, engine_of, generate, open_llm, random_prompts, write_model

SIZES: dict[str, Any] = {"num_blocks": 37, "block_size": 8, "max_model_len": 64}
PROMPTS = random_prompts([9, 20, 33])
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0),
]
FILE = "model.safetensors"


def outputs_of(llm: LLM) -> list[tuple[tuple[int, ...], list[float]]]:
    """Tokens and log-probabilities, greedy and seeded."""
    return [(one.token_ids, chosen_logprobs(one)) for one in generate(llm, PROMPTS, PARAMS)]


def leaves_of(llm: LLM) -> list[np.ndarray]:
    executor = engine_of(llm)._executor
    assert isinstance(executor, JaxExecutor)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(executor._runner.params)]


def write_other(folder: Path, other: Path) -> dict[str, np.ndarray]:
    """Writes a checkpoint of the same model with other weights; returns its tensors."""
    rng, tensors = np.random.default_rng(3), load_file(folder / FILE)
    for name in sorted(tensors):
        shape = tensors[name].shape
        if tensors[name].dtype.kind == "f":
            noise = rng.standard_normal(shape).astype(tensors[name].dtype) * np.float32(0.5)
            tensors[name] = (tensors[name] * (1 + noise)).astype(tensors[name].dtype)
    if "lm_head.weight" in tensors and "model.embed_tokens.weight" in tensors and "tied" in folder.name:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    other.mkdir()
    for file in folder.iterdir():
        if file.name != FILE:
            (other / file.name).write_bytes(file.read_bytes())
    save_file(tensors, other / FILE, metadata={"format": "pt"})
    return tensors


def nested(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors as dictionaries of dictionaries."""
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        place = tree
        for key in path:
            place = place.setdefault(key, {})
        place[last] = tensor
    return tree


def pairs(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from tensors.items()


def check_update(folder: Path, tmp_path: Path, options: dict[str, Any], forms: tuple[str, ...]) -> None:
    """Each form of new weights gives the leaves and outputs of a model that was loaded with them."""
    tensors = write_other(folder, tmp_path / "other")
    with open_llm(tmp_path / "other", **{**SIZES, **options}) as fresh:
        want, leaves = outputs_of(fresh), leaves_of(fresh)
    with open_llm(folder, **{**SIZES, **options}) as llm:
        before, old_leaves = outputs_of(llm), leaves_of(llm)
        assert before != want
        for number, form in enumerate(forms):
            given = {
                "folder": tmp_path / "other",
                "numpy": tensors,
                "nested": nested(tensors),
                "jax": pairs({name: jnp.asarray(tensor) for name, tensor in tensors.items()}),
            }[form]
            assert llm.update_weights(given) == str(2 * number + 1)
            for got, leaf in zip(leaves_of(llm), leaves, strict=True):
                np.testing.assert_array_equal(got, leaf)
            assert outputs_of(llm) == want
            assert llm.update_weights(folder) == str(2 * number + 2)
            for got, leaf in zip(leaves_of(llm), old_leaves, strict=True):
                np.testing.assert_array_equal(got, leaf)
            assert outputs_of(llm) == before


def test_outputs_are_those_of_the_new_weights(tmp_path: Path) -> None:
    check_update(write_model("llama_mha", tmp_path / "model"), tmp_path, {}, ("numpy", "folder"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama3_tied", {"dtype": "bfloat16"}),
        ("llama_gqa_bias", {"quantization": "int8"}),
        ("llama_mha", {"tensor_parallel_size": 2}),
        ("llama_gqa_bias", {"linear_backend": "xla", "kv_cache_dtype": "fp8"}),
        ("llama_gqa_bias", {"linear_backend": "xla", "quantization": "fp8"}),
        ("mistral_window", {"swap_space": 0.01}),
    ],
)
def test_every_form_of_weights_is_replaced(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    folder = write_model(name, tmp_path / f"model_{'tied' if 'tied' in name else ''}")
    check_update(folder, tmp_path, options, ("numpy", "folder", "nested", "jax"))
