"""A GGUF file of every family that is read in that format is the checkpoint that it was made of."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jpaged.checkpoints.gguf.tensors import read_model
from jpaged.checkpoints.hub import find_folder, read_config
from jpaged.checkpoints.weights import load_params
from jpaged.models.decoder import DecoderConfig
from jpaged.models.model import Model
from jpaged.models.rope import attention_factor, inverse_frequencies
from tests.checkpoints.gguf.files import checkpoint, of_kind, write_gguf, write_plain
from tests.models import dense

FLOAT = np.dtype(np.float32)
DELTA_RULE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
NAMES = (
    *("llama_mha", "llama_gqa_bias", "llama3_tied", "llama_linear", "mistral_window", "mistral_yarn", "mixtral"),
    *("qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "gemma2", "gemma3", "phi3", "phi3_long", "phi3_short"),
    *("gpt2", "gpt_neox", "gpt_neox_sequential", "starcoder2", "starcoder2_unbiased"),
    *("arcee", "smollm3", "granite", "olmo2", "olmo3", "glm4", "seed_oss", "exaone4", "hunyuan_v1_dense", "cohere"),
    *("cohere2", "stablelm", "stablelm_parallel", "nemotron", "ernie4_5", "lfm2", "gpt_oss"),
    *("gemma4_text", "gemma4_keys", "gemma4_moe"),
    *DELTA_RULE,
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
    same = dataclasses.replace(want, ropes=())
    if name == "qwen3_next":  # read as Qwen3.5, which has no width of layers without experts
        width = got.intermediate_size
        same = dataclasses.replace(same, architecture=got.architecture, intermediate_size=width)
    assert dataclasses.replace(got, ropes=()) == same
    params, plain = load_params(Model(got, FLOAT), file, "loop"), load_params(Model(want, FLOAT), folder, "loop")
    # A norm that is stored plus 1 has lost bits where it is near 0.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-7), params, plain)


def test_blocks_after_the_layers_are_draft_layers(tmp_path: Path) -> None:
    config, tensors = checkpoint("qwen3_5_text")
    full = {key: tensor for key, tensor in tensors.items() if key.startswith("model.layers.3.")}
    drafts = {key.replace("layers.3", "layers.4"): tensor for key, tensor in full.items()}
    drafts |= {f"model.layers.4.{name}.weight": np.ones(64, "f") for name in ("enorm", "hnorm", "shared_head.norm")}
    drafts["model.layers.4.eh_proj.weight"] = np.ones((64, 128), "f")
    more = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    write_gguf((config, tensors | drafts), tmp_path / "model.gguf", of_kind("F32"), more=more)
    found = read_model(tmp_path / "model.gguf")
    assert found.config.num_layers == 4
    outer = {"mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"}
    layers = {key.replace("model.layers.3", "mtp.layers.0") for key in full}
    assert {name for name in found.places if name.startswith("mtp.")} == outer | layers
    params = load_params(Model(found.config, FLOAT), tmp_path / "model.gguf", "loop")
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama3_tied", "gemma3", "phi3_long", "qwen3_moe", *NAMES[NAMES.index("arcee") :]])
def test_it_has_the_logits(name: str, tmp_path: Path) -> None:
    got, want = (logits(path) for path in write_both(name, tmp_path))
    # Rates of the delta rule are stored as exponentials, so that they are rounded, too.
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 if name in DELTA_RULE else 2e-5)


def logits(path: Path) -> np.ndarray:
    folder = find_folder(str(path))
    model = Model(read_config(folder), FLOAT)
    ids = np.arange(3, 83, dtype=np.int32) * 5 % 131
    return np.asarray(dense.logits(model, load_params(model, folder, "loop"), ids, len(ids), "loop"))
