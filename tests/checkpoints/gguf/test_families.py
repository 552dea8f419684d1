"""A GGUF file of every family that is read in that format is the checkpoint that it was made of."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jpaged.checkpoints.hub import find_folder, read_config
from jpaged.checkpoints.weights import load_params
from jpaged.models.decoder import DecoderConfig
from jpaged.models.model import Model
from jpaged.models.rope import attention_factor, inverse_frequencies
from tests.checkpoints.gguf.files import checkpoint, of_kind, write_gguf, write_plain
from tests.models import dense

FLOAT = np.dtype(np.float32)
NAMES = (
    *("llama_mha", "llama_gqa_bias", "llama3_tied", "llama_linear", "mistral_window", "mistral_yarn", "mixtral"),
    *("qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "gemma2", "gemma3", "phi3", "phi3_long", "phi3_short"),
    *("gpt2", "gpt_neox", "gpt_neox_sequential", "starcoder2", "starcoder2_unbiased"),
    *("arcee", "smollm3", "granite", "olmo2", "olmo3", "glm4", "seed_oss", "exaone4", "hunyuan_v1_dense", "cohere"),
    *("cohere2", "stablelm", "stablelm_parallel", "nemotron", "ernie4_5", "lfm2", "gpt_oss"),
)


def write_both(name: str, folder: Path) -> tuple[Path, Path]:
    """The same checkpoint as a GGUF file and as Hugging Face's libraries have it."""
    config, tensors = checkpoint(name)
    write_gguf((config, tensors), folder / "model.gguf", of_kind("F32"))
    return folder / "model.gguf", write_plain(config, tensors, folder / "hf")


def plain_config(config: Any) -> DecoderConfig:
    """A config less what says how it is written; a kind of layer that all are of may be left out."""
    assert isinstance(config, DecoderConfig)
    kinds = config.layer_kinds
    return dataclasses.replace(config, checkpoint_dtype=None, eos_token_ids=(), bos_token_id=None, kinds=kinds)


@pytest.mark.parametrize("name", NAMES)
def test_it_has_the_config_and_the_weights(name: str, tmp_path: Path) -> None:
    file, folder = write_both(name, tmp_path)
    got, want = plain_config(read_config(file)), plain_config(read_config(folder))
    for rope, wanted in zip(got.ropes, want.ropes, strict=True):
        frequencies = inverse_frequencies(rope, got.head_dim)
        np.testing.assert_allclose(frequencies, inverse_frequencies(wanted, got.head_dim), rtol=1e-6)
        assert attention_factor(rope) == pytest.approx(attention_factor(wanted), rel=1e-6)
        assert rope.long_factor == wanted.long_factor or name == "llama3_tied"
    if "mistral" in name:
        want = dataclasses.replace(want, architecture=got.architecture)
    assert dataclasses.replace(got, ropes=()) == dataclasses.replace(want, ropes=())
    params, plain = load_params(Model(got, FLOAT), file, "loop"), load_params(Model(want, FLOAT), folder, "loop")
    # A norm that is stored plus 1 has lost bits where it is near 0.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-7), params, plain)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama3_tied", "gemma3", "phi3_long", "qwen3_moe", *NAMES[NAMES.index("arcee") :]])
def test_it_has_the_logits(name: str, tmp_path: Path) -> None:
    got, want = (logits(path) for path in write_both(name, tmp_path))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def logits(path: Path) -> np.ndarray:
    folder = find_folder(str(path))
    model = Model(read_config(folder), FLOAT)
    ids = np.arange(3, 83, dtype=np.int32) * 5 % 131
    return np.asarray(dense.logits(model, load_params(model, folder, "loop"), ids, len(ids), "loop"))
