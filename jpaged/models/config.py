"""The shape of a model, read from a Hugging Face config.json: frozen, hashable values, static under jit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.json_fields import JsonFields
from jpaged.models.registry import Family, find_family

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]

# Keys that say nothing about what the model computes in inference.
_HARMLESS = (
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "name_or_path",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "finetuning_task",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "model_type",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "task_specific_params",
    "tokenizer_class",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
)

# Sampling defaults of old checkpoints: a request states its own.
_GENERATION_DEFAULTS = (
    "do_sample",
    "max_length",
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the base and how it is stretched beyond the length of pretraining.

    Attributes:
        kind: the formula; the fields below are used by the kinds in brackets.
        theta: base of the geometric series of wavelengths.
        factor: how far positions are stretched (all but default).
        original_max_position_embeddings: length of pretraining (dynamic, llama3, yarn).
        low_freq_factor: wavelengths above original / this are stretched fully (llama3).
        high_freq_factor: wavelengths below original / this are left alone (llama3).
        beta_fast: rotations above which a dimension is left alone (yarn).
        beta_slow: rotations below which a dimension is stretched fully (yarn).
        attention_factor: scales cos and sin; None derives it from factor and the two mscales (yarn).
        mscale: numerator's weight in the derived attention factor (yarn).
        mscale_all_dim: denominator's weight (yarn).
        truncate: whether the ramp between the betas starts and ends at whole dimensions (yarn).
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind in ("dynamic", "llama3", "yarn") and self.original_max_position_embeddings < 1:
            raise InvalidArgument(
                "original_max_position_embeddings",
                f"is {self.original_max_position_embeddings}; {self.kind} needs the length of pretraining, at least 1",
            )

    @classmethod
    def from_hf(cls, config: JsonFields, max_position_embeddings: int) -> RopeConfig:
        """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4).

        Raises:
            Unsupported: a kind or a key that we do not compute.
            InvalidArgument: a value out of range, or two sections that contradict each other.
        """
        old, new = config.mapping("rope_scaling"), config.mapping("rope_parameters")
        if old and new and dict(old) != dict(new):
            raise config.bad("rope_scaling", "and rope_parameters are both given and differ; keep one")
        section = "rope_scaling" if old else "rope_parameters"
        rope = JsonFields(old or new, f"config.json {section}")
        kind = _rope_kind(rope)
        config.only("partial_rotary_factor", 1, 1.0, why="only fully rotated heads are supported")
        rope.only("partial_rotary_factor", 1, 1.0, why="only fully rotated heads are supported")
        outer_theta = config.number("rope_theta", 10000.0)
        theta = rope.number("rope_theta", outer_theta)
        rope.ignore(("finetuned",))
        original = max_position_embeddings
        if kind in ("dynamic", "llama3", "yarn"):
            original = rope.integer("original_max_position_embeddings", original)
            # transformers lets the outer field win, which Phi-3 style checkpoints carry.
            original = config.integer("original_max_position_embeddings", original)
        if kind == "dynamic" and original != max_position_embeddings:
            raise Unsupported(
                f"config.json {section}: original_max_position_embeddings is {original} and max_position_embeddings "
                f"{max_position_embeddings}; dynamic scaling starts at max_position_embeddings, so they must be equal"
            )
        factor = 1.0
        if kind != "default":
            implied = max_position_embeddings / original if kind == "yarn" else None
            factor = rope.number("factor", implied)
            if factor < 1:
                raise rope.bad("factor", f"is {factor:g}; it must be at least 1")
        low, high, fast, slow = 1.0, 4.0, 32.0, 1.0
        if kind == "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if high <= low:
                raise rope.bad("high_freq_factor", f"is {high:g}; it must be above low_freq_factor, {low:g}")
        if kind == "yarn":
            fast, slow = rope.number("beta_fast", fast), rope.number("beta_slow", slow)
            if fast < slow:
                raise rope.bad("beta_fast", f"is {fast:g}; it must be at least beta_slow, {slow:g}")
        yarn = kind == "yarn"
        result = cls(
            kind=kind,
            theta=theta,
            factor=factor,
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
            beta_fast=fast,
            beta_slow=slow,
            attention_factor=rope.optional_number("attention_factor") if yarn else None,
            mscale=rope.optional_number("mscale") if yarn else None,
            mscale_all_dim=rope.optional_number("mscale_all_dim") if yarn else None,
            truncate=rope.flag("truncate", True) if yarn else True,
        )
        rope.finish()
        return result

    def to_hf(self) -> dict[str, object]:
        """The `rope_parameters` of config.json: the fields that this kind reads."""
        result: dict[str, object] = {"rope_type": self.kind, "rope_theta": self.theta}
        if self.kind != "default":
            result["factor"] = self.factor
        if self.kind in ("llama3", "yarn"):
            result["original_max_position_embeddings"] = self.original_max_position_embeddings
        if self.kind == "llama3":
            result |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        if self.kind == "yarn":
            result |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow, "truncate": self.truncate}
            optional = {
                "attention_factor": self.attention_factor,
                "mscale": self.mscale,
                "mscale_all_dim": self.mscale_all_dim,
            }
            result |= {key: value for key, value in optional.items() if value is not None}
        return result


def _rope_kind(rope: JsonFields) -> RopeKind:
    fallback = rope.text("type", "default")
    kind = rope.text("rope_type", fallback)
    if kind not in get_args(RopeKind):
        raise Unsupported(f"RoPE type {kind!r} is not supported; supported: {', '.join(get_args(RopeKind))}")
    return cast(RopeKind, kind)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything about a model that shapes its program; equal configs share compiled programs.

    Attributes:
        architecture: the class name in config.json `architectures`.
        vocab_size: rows of the embedding, V.
        hidden_size: model width, E.
        intermediate_size: feed-forward width, F.
        num_layers: L.
        num_heads: query heads, H.
        num_kv_heads: key and value heads, K; divides H.
        head_dim: D, even.
        rms_norm_eps: added to the mean square in every norm.
        rope: rotary position embedding.
        max_position_embeddings: length named by the checkpoint; `max_model_len` is what the rope makes of it.
        tie_word_embeddings: the embedding is also the output matrix.
        attention_bias: biases on query, key and value.
        attention_output_bias: a bias on the attention's output.
        mlp_bias: biases in the feed-forward.
        qk_norm: queries and keys are normalised per head before the rotation.
        eos_token_ids: tokens that end a sequence; may be empty.
        bos_token_id: token that begins a prompt, if the checkpoint names one.
        checkpoint_dtype: what the checkpoint says its weights are: float32, bfloat16 or float16.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    checkpoint_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise InvalidArgument(
                "num_kv_heads", f"is {self.num_kv_heads}; it must divide num_heads, {self.num_heads}, without rest"
            )
        if self.head_dim % 2:
            raise InvalidArgument("head_dim", f"is {self.head_dim}; rotary embedding needs an even number")
        if self.rope.kind == "dynamic" and self.head_dim <= 2:
            raise InvalidArgument("head_dim", f"is {self.head_dim}; dynamic rotary embedding needs at least 4")
        for token_id in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if token_id >= self.vocab_size:
                raise InvalidArgument(
                    "eos_token_id or bos_token_id", f"is {token_id}; it must be below vocab_size, {self.vocab_size}"
                )

    @property
    def max_model_len(self) -> int:
        """Longest sequence, in tokens, that the rotary embedding is meant for."""
        if self.rope.kind in ("linear", "dynamic"):
            return math.floor(self.max_position_embeddings * self.rope.factor)
        if self.rope.kind == "yarn":
            return math.floor(self.rope.original_max_position_embeddings * self.rope.factor)
        return self.max_position_embeddings

    @classmethod
    def from_hf(cls, config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> ModelConfig:
        """Reads a Hugging Face config.json.

        Args:
            config: the parsed file.
            generation: the parsed generation_config.json beside it. Only its `eos_token_id` is read, which wins
                over that of config.json, as in transformers' generate; its sampling defaults belong to requests.

        Raises:
            Unsupported: an architecture or a setting that this model code does not compute.
            InvalidArgument: a missing or malformed value.
        """
        fields = JsonFields(config, "config.json")
        architecture = _architecture(fields)
        family = find_family(architecture)
        fields.ignore(_HARMLESS + _GENERATION_DEFAULTS)
        _refuse_other_forms(fields)
        hidden_size = fields.integer("hidden_size")
        num_heads = fields.integer("num_attention_heads")
        num_kv_heads = fields.integer("num_key_value_heads", family.default_num_kv_heads or num_heads)
        if family.default_head_dim is None and not fields.has("head_dim") and hidden_size % num_heads:
            raise fields.bad("hidden_size", f"is {hidden_size}; without head_dim num_attention_heads must divide it")
        head_dim = fields.integer("head_dim", family.default_head_dim or hidden_size // num_heads)
        max_position_embeddings = fields.integer("max_position_embeddings", family.default_max_position_embeddings)
        attention_bias, output_bias = _attention_biases(fields, family)
        eos = fields.token_ids("eos_token_id")
        generation_eos = JsonFields(generation or {}, "generation_config.json").token_ids("eos_token_id")
        result = cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_hf(fields, max_position_embeddings),
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            attention_bias=attention_bias,
            attention_output_bias=output_bias,
            mlp_bias=_mlp_bias(fields, family),
            qk_norm=family.qk_norm,
            eos_token_ids=generation_eos or eos,
            bos_token_id=fields.integer("bos_token_id", minimum=0) if fields.has("bos_token_id") else None,
            checkpoint_dtype=_checkpoint_dtype(fields),
        )
        _refuse_window(fields, family, result)
        fields.finish()
        return result

    def to_hf(self) -> dict[str, object]:
        """The config.json that `from_hf` reads back to an equal value (transformers 5 layout)."""
        family = find_family(self.architecture)
        result: dict[str, object] = {
            "architectures": [self.architecture],
            "model_type": family.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_parameters": self.rope.to_hf(),
            "tie_word_embeddings": self.tie_word_embeddings,
            "eos_token_id": list(self.eos_token_ids) or None,
            "bos_token_id": self.bos_token_id,
            "dtype": self.checkpoint_dtype,
        }
        if family.attention_bias == "config":
            result["attention_bias"] = self.attention_bias
        if family.mlp_bias:
            result["mlp_bias"] = self.mlp_bias
        if family.window == "length":
            result["sliding_window"] = None
        if family.window == "switch":
            result["use_sliding_window"] = False
        return result


def _architecture(fields: JsonFields) -> str:
    names = fields.value("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.bad("architectures", f"is {names!r}; it must be a list of one name")
    return names[0]


def _checkpoint_dtype(fields: JsonFields) -> str | None:
    old, new = (fields.value(key) for key in ("torch_dtype", "dtype"))
    value = old if new is None else new
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise Unsupported(f"config.json: dtype is {value!r}; supported: float32, bfloat16, float16")
    return name


def _refuse_other_forms(fields: JsonFields) -> None:
    fields.only("hidden_act", "silu", "swish", why="only silu is supported")
    fields.only("quantization_config", why="quantised checkpoints are not supported; take the original weights")
    fields.only("auto_map", why="model code that comes with a checkpoint is never run")
    fields.only("pretraining_tp", 0, 1, why="split projections are not supported; only 1 is")
    fields.only("rope_interleaved", False, why="only half-split rotary embedding is supported")
    fields.only("use_mrope", False, why="multimodal rotary embedding is not supported")
    fields.only("chunk_size_feed_forward", 0, why="a chunked feed-forward is not supported; only 0 is")
    for key in ("num_experts", "num_local_experts"):
        fields.only(key, 0, why="mixtures of experts are not supported")
    for key in ("is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder", "torchscript"):
        fields.only(key, False, why="only decoder-only models are supported")


def _attention_biases(fields: JsonFields, family: Family) -> tuple[bool, bool]:
    """(bias on query, key and value; bias on the output)."""
    if family.attention_bias == "config":
        bias = fields.flag("attention_bias", False)
        return bias, bias
    fixed = family.attention_bias == "qkv"
    fields.only("attention_bias", fixed, why=f"{family.model_type} always computes {str(fixed).lower()}")
    return fixed, False


def _mlp_bias(fields: JsonFields, family: Family) -> bool:
    if family.mlp_bias:
        return fields.flag("mlp_bias", False)
    fields.only("mlp_bias", False, why=f"{family.model_type} has no biases in its feed-forward")
    return False


def _refuse_window(fields: JsonFields, family: Family, config: ModelConfig) -> None:
    """A window that some sequence could outgrow is refused; a wider one changes nothing."""
    layer_types = fields.value("layer_types")
    if layer_types is not None and layer_types != ["full_attention"] * config.num_layers:
        raise Unsupported(
            f"config.json: layer_types is {layer_types!r}; only full_attention in every layer is supported"
        )
    if family.window == "none":
        return
    # transformers gives Mistral a window of 4096 when the key is missing, and none when it is null.
    window = fields.value("sliding_window", 4096)
    is_on = window is not None
    if family.window == "switch":
        first_layer = fields.integer("max_window_layers", 28, minimum=0)
        is_on &= fields.flag("use_sliding_window", False) and first_layer < config.num_layers and layer_types is None
    if is_on and not (isinstance(window, int) and window >= config.max_model_len):
        raise Unsupported(
            f"config.json: sliding_window is {window!r}; sliding-window attention is not supported, "
            f"except as wide as the longest sequence, {config.max_model_len}"
        )
