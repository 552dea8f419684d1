"""Keys of a GGUF file mean what llama.cpp reads in them, and what it knows without them; others are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jpaged.checkpoints import hub
from jpaged.checkpoints.gguf.config import hf_config
from jpaged.checkpoints.gguf.file import open_gguf
from jpaged.errors import Unsupported
from jpaged.models.decoder import DecoderConfig
from tests.checkpoints.gguf.files import checkpoint, of_kind, write_gguf


def write(name: str, folder: Path, **more: Any) -> Path:
    """A tiny model with keys that its architecture has besides, or without those that are None."""
    model = checkpoint(name)
    file = folder / f"{name}.gguf"
    write_gguf(model, file, of_kind("F32"))
    architecture = open_gguf(file).architecture
    write_gguf(model, file, of_kind("F32"), more={f"{architecture}.{key}": value for key, value in more.items()})
    return file


@pytest.mark.parametrize(
    ("name", "kind", "factor"),
    [
        ("llama3_tied", "linear", 4.0),
        ("llama3_tied", "yarn", 4.0),
        ("llama3_tied", "yarn", 1.0),
        ("llama3_tied", None, 4.0),
        ("llama3_tied", "longrope", 1.0),
        ("phi3_long", "linear", 4.0),
        ("phi3_long", "yarn", 2.0),
    ],
)
def test_factors_that_are_listed_bear_no_scaling(name: str, kind: str | None, factor: float, tmp_path: Path) -> None:
    more = {"rope.scaling.type": kind, "rope.scaling.factor": factor}
    with pytest.raises(
        Unsupported, match=rf"rope.scaling.type is '{kind or 'linear'}' with a factor of {factor}, in addition"
    ):
        hub.read_config(write(name, tmp_path, **more))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama3_tied", {"rope.scaling.type": "none"}),
        ("llama3_tied", {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}),
        ("llama3_tied", {"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}),
        ("phi3_long", {"rope.scaling.type": "longrope"}),
        ("phi3_long", {"rope.scaling.type": "none"}),
        ("mistral_yarn", {"rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_ext_factor": 1.0}),
        ("mistral_yarn", {"rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_ext_factor": -1.0}),
        ("llama_linear", {"rope.scaling.type": None}),
        ("llama_linear", {"rope.scaling.type": None, "rope.scaling.factor": None, "rope.scale_linear": 4.0}),
        ("llama_mha", {"rope.scale_linear": 1.0, "rope.scaling.attn_factor": 1.0}),
        ("llama_mha", {"rope.scaling.type": "linear"}),
        ("qwen2", {"attention.layer_norm_epsilon": 0.5}),
        ("qwen3_moe", {"expert_shared_feed_forward_length": 0}),
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        ("gemma2", {"rope.freq_base_swa": 10000.0}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else value,
)
def test_what_changes_nothing_is_read(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    plain = hf_config(open_gguf(write(name, tmp_path)))
    if "rope.scale_linear" in more and name == "llama_linear":
        more = more | {"rope.scale_linear": plain["rope_parameters"]["factor"]}
    if "attn_logit_softcapping" in more:
        plain |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    file = write(name, tmp_path, **more)
    assert hf_config(open_gguf(file)) == plain
    hub.read_config(file)


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("gemma2", {"rope.freq_base_swa": 20000.0}, "rope.freq_base_swa is 20000.0; all layers of Gemma 2"),
        (
            "mistral_yarn",
            {"rope.scaling.yarn_attn_factor": 0.5},
            "yarn_attn_factor is 0.5; a separate attention factor",
        ),
        ("mistral_yarn", {"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5; only full extrapolation"),
        ("llama_mha", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, "type is none"),
        ("qwen3_moe", {"expert_shared_feed_forward_length": 64}, "expert_shared_feed_forward_length is 64"),
    ],
)
def test_what_would_change_something_is_refused(name: str, more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=message):
        hub.read_config(write(name, tmp_path, **more))


def test_yarn_begins_at_the_length_of_the_model_where_no_other_is_told(tmp_path: Path) -> None:
    found = hf_config(open_gguf(write("mistral_yarn", tmp_path, **{"rope.scaling.original_context_length": None})))
    assert found["rope_parameters"]["original_max_position_embeddings"] == found["max_position_embeddings"]


@pytest.mark.parametrize("window", [None, 0])
def test_gemma3_without_a_window_sees_everything(window: int | None, tmp_path: Path) -> None:
    file = write("gemma3", tmp_path, **{"attention.sliding_window": window})
    assert set(hf_config(open_gguf(file))["layer_types"]) == {"full_attention"}
    config = hub.read_config(file)
    assert isinstance(config, DecoderConfig)
    assert {kind.sliding_window for kind in config.attention_kinds} == {None}


@pytest.mark.parametrize("width", [None, 0])
def test_experts_are_parts_of_the_whole_width_where_theirs_is_not_told(width: int | None, tmp_path: Path) -> None:
    more = {"expert_feed_forward_length": width, "expert_shared_feed_forward_length": width}
    found = hf_config(open_gguf(write("qwen2_moe", tmp_path, **more)))
    whole, num_used = found["intermediate_size"], found["num_experts_per_tok"]
    assert (found["moe_intermediate_size"], found["shared_expert_intermediate_size"]) == (whole // num_used, whole)
