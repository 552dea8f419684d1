"""The same comparison against a transformers model in this process, at lengths and configs that no golden holds."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints.conversion import ConversionOptions, save_params
from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.weights import load_params
from jpaged.models.config import ModelConfig
from jpaged.models.llama import Llama
from jpaged.models.model import model_for
from tests.models import dense
from tests.models.tiny import TinyCase, tiny_case, tiny_cases, write_checkpoint

torch = pytest.importorskip("torch")


def transformers_logits(folder: Path, token_ids: np.ndarray) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor(token_ids[None].astype(np.int64))).logits[0].numpy()


@pytest.mark.parametrize("case", tiny_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("num_tokens", [2, 63, 131])
def test_logits_equal_those_of_transformers_at_any_length(case: TinyCase, num_tokens: int, tmp_path: Path) -> None:
    write_checkpoint(case, tmp_path)
    token_ids = np.random.default_rng(num_tokens).integers(0, 131, num_tokens).astype(np.int32)
    model = model_for(read_config(tmp_path), np.dtype(jnp.float32))
    logits = dense.logits(model, load_params(model, tmp_path, "loop"), token_ids, num_tokens)
    np.testing.assert_allclose(logits, transformers_logits(tmp_path, token_ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama_gqa_bias", "mistral_yarn", "qwen2_tied_yarn", "qwen3_tied", "opt_post_norm"])
def test_a_checkpoint_that_we_write_is_read_by_transformers_to_the_same_logits(name: str, tmp_path: Path) -> None:
    case = tiny_case(name)
    model = model_for(ModelConfig.from_hf(case.config), np.dtype(jnp.float32))
    params = load_params(model, write_checkpoint(case, tmp_path / "theirs"), "loop")
    save_params(params, model.config, tmp_path / "ours", ConversionOptions("safetensors"))
    token_ids = np.array(case.prompt(), np.int32)
    expected = dense.logits(model, params, token_ids, len(token_ids))
    np.testing.assert_allclose(transformers_logits(tmp_path / "ours", token_ids), expected, rtol=0, atol=1e-4)


def test_positions_far_out_keep_their_frequencies(tmp_path: Path) -> None:
    """At position 100 000 a rounding of the frequencies in another way would turn heads by hundredths of a radian."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    case = tiny_case("llama3_new_style")
    write_checkpoint(case, tmp_path)
    positions = np.arange(99_000, 100_000, dtype=np.int32)
    cos, sin = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))(
        torch.zeros(1), torch.tensor(positions[None].astype(np.int64))
    )
    half = cos.shape[-1] // 2
    model = model_for(read_config(tmp_path), np.dtype(jnp.float32))
    assert isinstance(model, Llama)
    ours = model.rope(jnp.asarray(positions), jnp.asarray(positions) + 1)
    np.testing.assert_allclose(ours[0], cos[0, :, :half].numpy(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(ours[1], sin[0, :, :half].numpy(), rtol=0, atol=1e-5)
