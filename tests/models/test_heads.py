"""EAGLE-3 heads as their config.json describes them, and the MTP layers of models."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints.names import model_leaves
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.config import ModelConfig
from jpaged.models.eagle import mtp_config
from jpaged.models.hf_config import from_hf, head_from_hf, to_hf
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.models.stack import LayerMode
from jpaged.models.tokens import TokenBatch
from jpaged.plan.known_models import KNOWN_MODELS
from tests.models import dense
from tests.models.eagle_heads import HeadSizes
from tests.models.tiny import TinyCase, tiny_case, tiny_cases

SIZES = HeadSizes(100, 32, inner=48, num_heads=4, num_kv_heads=2, head_dim=16, target_hidden_size=64)
KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"])
def test_a_head_has_one_name_here(name: str) -> None:
    config = head_from_hf(SIZES.config(architectures=[name], draft_vocab_size=30, norm_before_residual=True))
    assert config.architecture == "Eagle3LlamaForCausalLM"
    sizes = config.vocab_size, config.draft_vocab_size, config.hidden_size, config.target_hidden_size
    assert sizes == (100, 30, 32, 64)
    assert config.norm_before_residual
    assert head_from_hf(to_hf(config)) == config


def test_what_a_head_does_not_say_is_as_the_model_has_it() -> None:
    config = head_from_hf(SIZES.config(draft_vocab_size=None, target_hidden_size=None, tie_word_embeddings=True))
    assert (config.draft_vocab_size, config.target_hidden_size) == (100, 32)
    assert not config.tie_word_embeddings
    assert not config.norm_before_residual


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, (2, 16, 29)),
        ({KEY: []}, (2, 16, 29)),
        ({KEY: [1, 9, 32]}, (1, 9, 32)),
        ({"eagle_config": {KEY: [1, 9, 31], "use_aux_hidden_state": True}}, (2, 10, 32)),
        ({"eagle_config": {KEY: []}}, (2, 16, 29)),
    ],
)
def test_layers_are_named_by_input_at_the_top_and_by_output_below(
    config: dict[str, Any], layers: tuple[int, ...]
) -> None:
    assert head_from_hf(SIZES.config(**config)).get_layers(32) == layers


def test_a_head_of_layers_that_a_model_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="input of layers 2, 1, -1, but the model has 2"):
        head_from_hf(SIZES.config()).get_layers(2)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["fc.weight", "d2t"], (False, True, "midlayer")),
        (["embed_tokens.weight", "layers.0.hidden_norm.weight"], (True, False, "layers.0")),
    ],
)
def test_what_a_checkpoint_holds_is_told_by_its_names(names: list[str], found: tuple[bool, bool, str]) -> None:
    config = head_from_hf(SIZES.config()).stored_as(names)
    assert (config.has_embedding, config.has_ids, config.layer_name) == found


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "'Qwen3ForCausalLM' is not a supported EAGLE-3 head"),
        ({"architectures": ["Eagle3Speculator"]}, "'Eagle3Speculator' is not a supported EAGLE-3 head"),
        ({"num_hidden_layers": 2}, "only EAGLE-3 heads with 1 layer are supported"),
        ({"draft_vocab_size": 101}, "draft_vocab_size: is 101, above vocab_size, 100"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "heads that use only the last hidden state"),
        ({"eagle_config": {"depth": 3}}, "unknown setting depth=3"),
        ({KEY: [1, 2]}, "it must list 3 layers"),
        ({"parallel": True}, "unknown setting parallel=True"),
        ({"quantization_config": {}}, "quantized checkpoints are not supported"),
    ],
)
def test_a_head_of_another_kind_is_refused(config: dict[str, Any], problem: str) -> None:
    with pytest.raises((InvalidArgument, Unsupported), match=problem):
        head_from_hf(SIZES.config(**config))


def test_a_head_is_not_served_as_a_model() -> None:
    with pytest.raises(Unsupported, match="is a draft head: it can only be served together with another model"):
        from_hf(SIZES.config(architectures=["Eagle3LlamaForCausalLM"]))
    with pytest.raises(Unsupported, match="is a draft head: it can only be served together with another model"):
        from_hf({**MIMO_7B, "architectures": ["MiMoMTPModel"]})
    with pytest.raises(Unsupported, match="architecture 'LlamaForCausalLMEagle3' is not supported"):
        from_hf(SIZES.config())


MIMO_7B = {
    "architectures": ["MiMoForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig", "AutoModel": "modeling_mimo.MiMoForCausalLM"},
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "model_type": "mimo",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 640000,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151680,
}


def test_mimo_is_qwen2_with_a_layer_for_drafts() -> None:
    config = from_hf(MIMO_7B)
    counts = ("num_nextn_predict_layers", "architectures", "model_type")
    qwen2 = {key: value for key, value in MIMO_7B.items() if key not in counts}
    other = from_hf({**qwen2, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"})
    assert dataclasses.replace(config, architecture=other.architecture) == other
    assert from_hf(to_hf(config)) == config


@pytest.mark.parametrize(
    ("config", "projection", "shape", "last"),
    [
        (from_hf(MIMO_7B), "model.mtp_layers.0.input_proj", (4096, 8192), "model.mtp_layers.0.mlp.down_proj"),
        (
            KNOWN_MODELS["deepseek-v3"].config,
            "model.layers.61.eh_proj",
            (7168, 14336),
            "model.layers.61.mlp.experts.255.down_proj",
        ),
        (
            from_hf(tiny_case("glm4_moe").config),
            "model.layers.3.eh_proj",
            (64, 128),
            "model.layers.3.mlp.experts.7.down_proj",
        ),
    ],
    ids=["mimo-7b", "deepseek-v3", "glm4_moe"],
)
def test_an_mtp_layer_has_the_published_names(
    config: ModelConfig, projection: str, shape: tuple[int, int], last: str
) -> None:
    """It is like the last layer of the model, and has neither embedding nor output matrix."""
    mtp = mtp_config(config)
    leaves = model_leaves(mtp)
    assert mtp.layer_kinds == config.layer_kinds[-1:]
    assert dict(leaves.outer[2].tensors) == {f"{projection}.weight": shape}
    (layer,) = leaves.layers
    names = {name for leaf in layer for name, _ in leaf.tensors}
    assert f"{last}.weight" in names
    begin = projection.rpartition(".")[0]
    assert all(
        name.startswith(f"{begin}.") for name in names | {name for leaf in leaves.outer for name, _ in leaf.tensors}
    )


@pytest.mark.parametrize("mode", ["loop", "scan"])
@pytest.mark.parametrize("case", tiny_cases(), ids=lambda case: case.name)
@pytest.mark.thinned(5)
def test_every_model_has_states_that_a_head_may_watch(case: TinyCase, mode: LayerMode) -> None:
    """They are the inputs of layers, and the output of the last one."""
    model = Model(from_hf(case.config), np.dtype(np.float32))
    positions_t, watched = jnp.arange(6), (0, 1, model.config.num_layers)

    def run(params: Params) -> tuple[jax.Array, list[jax.Array]]:
        tokens = TokenBatch(positions_t, positions_t, positions_t + 1)
        hidden_te, _, seen = model.run_watched(params, tokens, dense.attend, (), mode, watched)
        return hidden_te, seen

    hidden, seen = jax.eval_shape(run, model.abstract_params(mode))
    assert hidden.shape == (6, model.config.hidden_size)
    assert [one.shape for one in seen] == [hidden.shape] * 3
