"""The shape of a Llama: what its architecture fixes in code, and what it reads of a config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.config import MAX_LAYERS, MAX_VOCAB_SIZE, MAX_WIDTH, ModelConfig
from jpaged.models.json_fields import JsonFields
from jpaged.models.rope_config import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """A model of the Llama family: rotary positions, RMS norms, a gated feed-forward.

    Attributes:
        rms_norm_eps: added to the mean square in every norm.
        attention_bias: biases on query, key and value.
        qk_norm: queries and keys are normalised per head before the rotation.
    """

    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if self.rope.kind == "dynamic" and self.head_dim <= 2:
            raise InvalidArgument("head_dim", f"is {self.head_dim}; dynamic rotary embedding needs at least 4")

    @property
    def max_model_len(self) -> int:
        """Longest sequence, in tokens, that the rotary embedding is meant for."""
        if self.rope.kind in ("linear", "dynamic"):
            return math.floor(self.max_position_embeddings * self.rope.factor)
        if self.rope.kind == "yarn":
            return math.floor(self.rope.original_max_position_embeddings * self.rope.factor)
        return self.max_position_embeddings

    @property
    def max_prefix_len(self) -> int | None:
        """A dynamic rope turns every position of a longer prompt otherwise."""
        return self.rope.original_max_position_embeddings if self.rope.kind == "dynamic" else None


@dataclass(frozen=True, slots=True)
class LlamaVariant:
    """What distinguishes the architectures that share the modules of this family, fixed in code.

    Attributes:
        attention_bias: where biases are: `config` reads `attention_bias` for all four projections, `qkv` means
            always on query, key and value only, `none` never.
        mlp_bias: whether config.json may ask for biases in the feed-forward.
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

    def read(self, fields: JsonFields, architecture: str) -> LlamaConfig:
        """See `Family`."""
        hidden_size = fields.integer("hidden_size", maximum=MAX_WIDTH)
        num_heads = fields.integer("num_attention_heads", maximum=MAX_WIDTH)
        num_kv_heads = fields.integer("num_key_value_heads", self.default_num_kv_heads or num_heads, maximum=MAX_WIDTH)
        if self.default_head_dim is None and not fields.has("head_dim") and hidden_size % num_heads:
            raise fields.bad("hidden_size", f"is {hidden_size}; without head_dim num_attention_heads must divide it")
        max_position_embeddings = fields.integer("max_position_embeddings", self.default_max_position_embeddings)
        fields.only("hidden_act", "silu", "swish", why="only silu is supported")
        attention_bias, output_bias = self._attention_biases(fields)
        result = LlamaConfig(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size", maximum=MAX_VOCAB_SIZE),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size", maximum=MAX_WIDTH),
            num_layers=fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=fields.integer("head_dim", self.default_head_dim or hidden_size // num_heads, maximum=MAX_WIDTH),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_hf(fields, max_position_embeddings),
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            attention_bias=attention_bias,
            attention_output_bias=output_bias,
            mlp_bias=self._mlp_bias(fields),
            qk_norm=self.qk_norm,
        )
        self._refuse_window(fields, result)
        return result

    def to_hf(self, config: LlamaConfig) -> dict[str, object]:
        """See `Family`."""
        result: dict[str, object] = {
            "intermediate_size": config.intermediate_size,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": config.rms_norm_eps,
            "rope_parameters": config.rope.to_hf(),
        }
        if self.attention_bias == "config":
            result["attention_bias"] = config.attention_bias
        if self.mlp_bias:
            result["mlp_bias"] = config.mlp_bias
        if self.window == "length":
            result["sliding_window"] = None
        if self.window == "switch":
            result["use_sliding_window"] = False
        return result

    def _attention_biases(self, fields: JsonFields) -> tuple[bool, bool]:
        """(bias on query, key and value; bias on the output)."""
        if self.attention_bias == "config":
            bias = fields.flag("attention_bias", False)
            return bias, bias
        fixed = self.attention_bias == "qkv"
        fields.only("attention_bias", fixed, why=f"{self.model_type} always computes {str(fixed).lower()}")
        return fixed, False

    def _mlp_bias(self, fields: JsonFields) -> bool:
        if self.mlp_bias:
            return fields.flag("mlp_bias", False)
        fields.only("mlp_bias", False, why=f"{self.model_type} has no biases in its feed-forward")
        return False

    def _refuse_window(self, fields: JsonFields, config: LlamaConfig) -> None:
        """A window that some sequence could outgrow is refused; a wider one changes nothing."""
        layer_types = fields.value("layer_types")
        if layer_types is not None and layer_types != ["full_attention"] * config.num_layers:
            raise Unsupported(
                f"config.json: layer_types is {layer_types!r}; only full_attention in every layer is supported"
            )
        if self.window == "none":
            return
        # transformers gives Mistral a window of 4096 when the key is missing, and none when it is null.
        window = fields.value("sliding_window", 4096)
        is_on = window is not None
        if self.window == "switch":
            first_layer = fields.integer("max_window_layers", 28, minimum=0)
            is_on &= fields.flag("use_sliding_window", False)
            is_on &= first_layer < config.num_layers and layer_types is None
        if is_on and not (isinstance(window, int) and window >= config.max_model_len):
            raise Unsupported(
                f"config.json: sliding_window is {window!r}; sliding-window attention is not supported, "
                f"except as wide as the longest sequence, {config.max_model_len}"
            )
