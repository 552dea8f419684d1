"""Architecture names of Hugging Face checkpoints -> what a family fixes in code rather than in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jpaged.errors import Unsupported


@dataclass(frozen=True, slots=True)
class LlamaFamily:
    """What distinguishes the families that share our Llama modules.

    Attributes:
        model_type: the `model_type` of its config.json.
        attention_bias: where biases are: `config` reads `attention_bias` for all four projections, `qkv` means
            always on query, key and value only, `none` never.
        mlp_bias: whether config.json may ask for biases in the feed-forward.
        qk_norm: whether queries and keys are normalised per head.
        window: how config.json says that a sliding window is used: `none`, `sliding_window` alone, or together
            with the switch `use_sliding_window`.
        default_head_dim: used when config.json has none; None derives it from hidden_size.
        default_num_kv_heads: used when config.json has none; None means as many as query heads.
        default_max_position_embeddings: used when config.json has none.
    """

    model_type: str
    attention_bias: Literal["config", "qkv", "none"]
    mlp_bias: bool
    qk_norm: bool
    window: Literal["none", "length", "switch"]
    default_head_dim: int | None
    default_num_kv_heads: int | None
    default_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class OptFamily:
    """OPT leaves everything to config.json."""

    model_type: str


Family = LlamaFamily | OptFamily

ARCHITECTURES: Mapping[str, Family] = {
    "LlamaForCausalLM": LlamaFamily("llama", "config", True, False, "none", None, None, 2048),
    "MistralForCausalLM": LlamaFamily("mistral", "none", False, False, "length", None, 8, 131072),
    "Qwen2ForCausalLM": LlamaFamily("qwen2", "qkv", False, False, "switch", None, None, 32768),
    "Qwen3ForCausalLM": LlamaFamily("qwen3", "config", False, True, "switch", 128, None, 32768),
    "OPTForCausalLM": OptFamily("opt"),
}


def find_family(architecture: str) -> Family:
    """The family of an architecture.

    Raises:
        Unsupported: the architecture is not served; the message lists those that are.
    """
    family = ARCHITECTURES.get(architecture)
    if family is None:
        raise Unsupported(f"architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return family
