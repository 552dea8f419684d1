"""The shape of a model, read from a Hugging Face config.json: frozen, hashable values, static under jit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.json_fields import JsonFields
from jpaged.models.registry import LlamaFamily, OptFamily, find_family
from jpaged.models.rope_config import RopeConfig

Activation = Literal["relu", "gelu"]

MAX_LAYERS = 2**12
MAX_WIDTH = 2**20
"""Of hidden state, feed-forward and heads: far more than any model has, and little enough to be allocated."""
MAX_VOCAB_SIZE = 2**24

OPT_POSITION_OFFSET = 2
"""Rows of OPT's positional embedding before that of position 0."""

# Keys that say nothing about what the model computes in inference.
_HARMLESS = (
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "name_or_path",
    "activation_dropout",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "dropout",
    "finetuning_task",
    "id2label",
    "init_std",
    "initializer_range",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "layerdrop",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What every model has: what memory, sampling and attention need. A family's own shape is its subclass.

    Equal configs share compiled programs.

    Attributes:
        architecture: the class name in config.json `architectures`.
        vocab_size: rows of the embedding, V.
        hidden_size: model width, E.
        intermediate_size: feed-forward width, F.
        num_layers: L.
        num_heads: query heads, H.
        num_kv_heads: key and value heads, K; divides H.
        head_dim: D, even.
        max_position_embeddings: length named by the checkpoint; `max_model_len` is what the model makes of it.
        tie_word_embeddings: the embedding is also the output matrix.
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
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    checkpoint_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise InvalidArgument(
                "num_kv_heads", f"is {self.num_kv_heads}; it must divide num_heads, {self.num_heads}, without rest"
            )
        if self.head_dim % 2:
            raise InvalidArgument("head_dim", f"is {self.head_dim}; it must be an even number")
        for token_id in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if token_id >= self.vocab_size:
                raise InvalidArgument(
                    "eos_token_id or bos_token_id", f"is {token_id}; it must be below vocab_size, {self.vocab_size}"
                )

    @property
    def max_model_len(self) -> int:
        """Longest sequence, in tokens, that the model is meant for."""
        return self.max_position_embeddings

    @property
    def max_prefix_len(self) -> int | None:
        """Tokens up to which the keys of a prefix do not depend on what follows; None is without a limit."""
        return None

    @classmethod
    def from_hf(cls, config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> ModelConfig:
        """Reads a Hugging Face config.json; the result is of the architecture's subclass.

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
        eos = fields.token_ids("eos_token_id")
        generation_eos = JsonFields(generation or {}, "generation_config.json").token_ids("eos_token_id")
        result = _opt(fields, architecture) if isinstance(family, OptFamily) else _llama(fields, architecture, family)
        result = replace(
            result,
            eos_token_ids=generation_eos or eos,
            bos_token_id=fields.integer("bos_token_id", minimum=0) if fields.has("bos_token_id") else None,
            checkpoint_dtype=_checkpoint_dtype(fields),
        )
        fields.finish()
        return result

    def to_hf(self) -> dict[str, object]:
        """The config.json that `from_hf` reads back to an equal value (transformers 5 layout)."""
        return {
            "architectures": [self.architecture],
            "model_type": find_family(self.architecture).model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "eos_token_id": list(self.eos_token_ids) or None,
            "bos_token_id": self.bos_token_id,
            "dtype": self.checkpoint_dtype,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """A model of the Llama family: rotary positions, RMS norms, a gated feed-forward.

    Attributes:
        rms_norm_eps: added to the mean square in every norm.
        rope: rotary position embedding.
        attention_bias: biases on query, key and value.
        attention_output_bias: a bias on the attention's output.
        mlp_bias: biases in the feed-forward.
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

    def to_hf(self) -> dict[str, object]:
        """See `ModelConfig.to_hf`."""
        family = find_family(self.architecture)
        assert isinstance(family, LlamaFamily)
        result = ModelConfig.to_hf(self) | {
            "intermediate_size": self.intermediate_size,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": self.rope.to_hf(),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OptConfig(ModelConfig):
    """An OPT model: learned positions, layer norms, a plain feed-forward, as many key/value heads as query heads.

    Attributes:
        embed_size: width of the embedding; where it is not hidden_size, matrices lead into the layers and out of them.
        activation: between the two matrices of the feed-forward.
        norm_first: layers normalise what goes into attention and feed-forward; else what comes out, with the residual.
        final_norm: a norm after the last layer.
        norm_affine: norms have scales and biases.
        use_bias: biases in attention and feed-forward.
    """

    embed_size: int
    activation: Activation = "relu"
    norm_first: bool = True
    final_norm: bool = True
    norm_affine: bool = True
    use_bias: bool = True

    def to_hf(self) -> dict[str, object]:
        """See `ModelConfig.to_hf`."""
        return ModelConfig.to_hf(self) | {
            "ffn_dim": self.intermediate_size,
            "word_embed_proj_dim": self.embed_size,
            "activation_function": self.activation,
            "do_layer_norm_before": self.norm_first,
            "_remove_final_layer_norm": not self.final_norm,
            "layer_norm_elementwise_affine": self.norm_affine,
            "enable_bias": self.use_bias,
        }


def _llama(fields: JsonFields, architecture: str, family: LlamaFamily) -> LlamaConfig:
    hidden_size = fields.integer("hidden_size", maximum=MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", maximum=MAX_WIDTH)
    num_kv_heads = fields.integer("num_key_value_heads", family.default_num_kv_heads or num_heads, maximum=MAX_WIDTH)
    if family.default_head_dim is None and not fields.has("head_dim") and hidden_size % num_heads:
        raise fields.bad("hidden_size", f"is {hidden_size}; without head_dim num_attention_heads must divide it")
    max_position_embeddings = fields.integer("max_position_embeddings", family.default_max_position_embeddings)
    fields.only("hidden_act", "silu", "swish", why="only silu is supported")
    attention_bias, output_bias = _attention_biases(fields, family)
    result = LlamaConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", maximum=MAX_VOCAB_SIZE),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", maximum=MAX_WIDTH),
        num_layers=fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.integer("head_dim", family.default_head_dim or hidden_size // num_heads, maximum=MAX_WIDTH),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=RopeConfig.from_hf(fields, max_position_embeddings),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=attention_bias,
        attention_output_bias=output_bias,
        mlp_bias=_mlp_bias(fields, family),
        qk_norm=family.qk_norm,
    )
    _refuse_window(fields, family, result)
    return result


def _opt(fields: JsonFields, architecture: str) -> OptConfig:
    # What a pipeline puts before a prompt, and a note on how the checkpoint was converted: transformers reads neither.
    fields.ignore(("prefix", "output_projection"))
    hidden_size, num_heads = (
        fields.integer("hidden_size", maximum=MAX_WIDTH),
        fields.integer("num_attention_heads", maximum=MAX_WIDTH),
    )
    if hidden_size % num_heads:
        raise fields.bad("hidden_size", f"is {hidden_size}; num_attention_heads, {num_heads}, must divide it")
    activation = fields.text("activation_function", "relu")
    if activation not in get_args(Activation):
        raise Unsupported(
            f"config.json: activation_function is {activation!r}; supported: {', '.join(get_args(Activation))}"
        )
    norm_first = fields.flag("do_layer_norm_before", True)
    is_removed = fields.flag("_remove_final_layer_norm", False)
    return OptConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", maximum=MAX_VOCAB_SIZE),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("ffn_dim", maximum=MAX_WIDTH),
        num_layers=fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        embed_size=fields.integer("word_embed_proj_dim", hidden_size, maximum=MAX_WIDTH),
        activation=cast(Activation, activation),
        norm_first=norm_first,
        final_norm=norm_first and not is_removed,
        norm_affine=fields.flag("layer_norm_elementwise_affine", True),
        use_bias=fields.flag("enable_bias", True),
    )


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


def _attention_biases(fields: JsonFields, family: LlamaFamily) -> tuple[bool, bool]:
    """(bias on query, key and value; bias on the output)."""
    if family.attention_bias == "config":
        bias = fields.flag("attention_bias", False)
        return bias, bias
    fixed = family.attention_bias == "qkv"
    fields.only("attention_bias", fixed, why=f"{family.model_type} always computes {str(fixed).lower()}")
    return fixed, False


def _mlp_bias(fields: JsonFields, family: LlamaFamily) -> bool:
    if family.mlp_bias:
        return fields.flag("mlp_bias", False)
    fields.only("mlp_bias", False, why=f"{family.model_type} has no biases in its feed-forward")
    return False


def _refuse_window(fields: JsonFields, family: LlamaFamily, config: LlamaConfig) -> None:
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
