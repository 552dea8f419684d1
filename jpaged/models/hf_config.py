"""A model's config, read from a Hugging Face config.json and written to one."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from dataclasses import replace

from jpaged.errors import Unsupported
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import DecoderConfig
from jpaged.models.decoder.config_fields import ACTIVATIONS, FULL, SLIDING
from jpaged.models.eagle import HEADS, NAMES, EagleConfig
from jpaged.models.json_fields import JsonFields
from jpaged.models.registry import ARCHITECTURES, SYNONYMS, find_family, unsupported
from jpaged.models.vision.config import read_vision

_LOG = logging.getLogger(__name__)

# Keys without effect on inference.
_HARMLESS = (
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_experts_implementation",
    "_flash_attn_2_enabled",
    "_model_name_or_path",  # of a GGUF file that transformers has converted
    "_name_or_path",
    "_num_labels",
    "name_or_path",
    "activation_dropout",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    # Classes of the repository, which are never run: the architecture is looked up by its name.
    "auto_map",
    "cache_implementation",
    # Of classification heads, which are read with the weights.
    "classifier_from_token",
    "is_original_qwen3_reranker",
    "custom_pipelines",
    "decoder_start_token_id",
    "dropout",
    "experts_implementation",
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "init_std",
    "initializer_range",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "layerdrop",
    "max_model_len",  # a key of hf_overrides in examples of vLLM, which ignores it
    "model_type",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",  # into how many parts a projection was split, whose sum is the same
    "problem_type",
    "return_dict",
    "sep_token_id",
    "task_specific_params",
    "tf_legacy_loss",
    "tokenizer_class",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
    "use_flash_attention",
    "use_flash_attention_2",
    "use_flash_attn",
)

# Sampling defaults of old checkpoints, which transformers 5 separates: a request has its own.
_GENERATION_DEFAULTS = (
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "no_repeat_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "target_lookbehind",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
)

_TRAINING = re.compile(
    r"(^|_)(train|dropout|pdrop|loss|initializer|init_(range|std|scale)|gradient|learning|lr(_|$)|optimi[sz]|warmup|finetun)"
)
"""Words of keys about training, which inference does not read."""
_MODELING = (
    *("act", "alibi", "alpha", "atten", "attn", "audio", "beta", "bias", "block", "bound", "bypass", "cap", "causal"),
    *("channel", "chunk", "clamp", "clip", "codebook", "compress", "conditional", "config", "conv", "cross", "decod"),
    *("delta", "depth", "dim", "embd", "embed", "emb", "encod", "eos", "bos", "eps", "expan", "expert", "factor"),
    *("feat", "feed", "ff", "final", "fp", "frequenc", "fun", "gamma", "gate", "gating", "gelu", "global", "glu"),
    *("group", "hc", "head", "hidden", "hybrid", "image", "index", "inner", "intermediate", "interleav", "kda"),
    *("kernel", "key", "kv", "latent", "layer", "len", "limit", "ln", "local", "logit", "loop", "lora", "low", "lru"),
    *("mamba", "mask", "max", "mem", "min", "mix", "mla", "mlp", "mod", "moe", "mtp", "mult", "mup", "nextn"),
    *("nope", "norm", "ntk", "num", "offset", "order", "output", "parallel", "partial", "pattern", "period", "ple"),
    *("pool", "pos", "post", "pre", "proj", "prompt", "qk", "quant", "quer", "rank", "ratio", "recurren", "reduc"),
    *("rel", "repeat", "rescal", "resid", "rms", "rope", "rotar", "rout", "scal", "scor", "segment", "select", "seq"),
    *("share", "sigmoid", "sink", "size", "skip", "sliding", "soft", "span", "sparse", "ssm", "state", "step"),
    *("stride", "structure", "swa", "swiglu", "temperature", "text", "theta", "tie", "token", "top", "transform"),
    *("type", "value", "video", "vision", "visual", "vocab", "weight", "wide", "width", "window", "yarn"),
)
"""Prefixes of words that name parts of models: a key with one of them could change the output."""
_SWITCHES = ("apply", "do", "enable", "has", "no", "use", "with")
"""First words of keys that turn something on."""
CLASSIFIER = "ForSequenceClassification"
"""End of the names of models with a classification head."""
FROM_TOKENS = "classifier_from_token"
"""Key with the tokens whose rows of the output matrix are the head."""
_NAMES_OF_DTYPES = {"half": "float16", "float": "float32"}


def from_hf(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> ModelConfig:
    """Read a Hugging Face config.json; the result has the architecture's subclass.

    Args:
        generation: the parsed generation_config.json next to it. Only its `eos_token_id` is read here, which overrides
            that of config.json, as in transformers' generate. If neither has the key, the family's default applies;
            null means none.

    Raises:
        Unsupported: an architecture or a setting that is not implemented.
        InvalidArgument: a missing or malformed value.
    """
    whole = JsonFields(config, "config.json")
    architecture = _architecture(whole)
    if architecture in HEADS:
        raise Unsupported(f"{architecture} is a draft head: it can only be served together with another model")
    return _read(whole, architecture, generation, config)


def head_from_hf(config: Mapping[str, object]) -> EagleConfig:
    """Read the config.json of an EAGLE-3 head; its optional tensors are not known yet.

    Raises:
        Unsupported: another kind of head, or a setting that is not implemented.
        InvalidArgument: a missing or malformed value.
    """
    whole = JsonFields(config, "config.json")
    name = _architecture(whole)
    if name not in NAMES:
        raise Unsupported(f"{name!r} is not a supported EAGLE-3 head; supported: {', '.join(NAMES)}")
    result = _read(whole, NAMES[name], None, config)
    assert isinstance(result, EagleConfig)
    return result


def _read(
    whole: JsonFields, architecture: str, generation: Mapping[str, object] | None, given: Mapping[str, object]
) -> ModelConfig:
    family = find_family(architecture)
    fields = whole if family.language is None else family.language(whole)
    for part in (whole, fields):
        part.ignore(_HARMLESS + _GENERATION_DEFAULTS)
        _refuse_other_forms(part)
    known: ModelConfig = family.read(fields, architecture)
    eos = _eos(fields, known.eos_token_ids)
    generation_eos = JsonFields(generation or {}, "generation_config.json").token_ids("eos_token_id")
    if _is_classifier(whole) and not whole.has(FROM_TOKENS):  # it has no output matrix
        known = replace(known, tie_word_embeddings=True)
    result = replace(
        known,
        eos_token_ids=generation_eos or eos,
        bos_token_id=_bos(fields, known.bos_token_id),
        checkpoint_dtype=_checkpoint_dtype(fields),
    )
    if family.language is not None:
        result = replace(result, vision=read_vision(given, result))
    _report(tuple(key for part in dict.fromkeys((whole, fields)) for key in _finish(part, result)))
    return result


def _finish(fields: JsonFields, config: ModelConfig) -> list[str]:
    """Accept keys that restate what the model computes, and return those that no code reads.

    Raises:
        Unsupported: a key could change the output; names it.
    """
    unread, restated = fields.unread(), _restatements(config)
    private = [key for key, value in unread.items() if not _could_matter(key, value)]
    same = [key for key, value in unread.items() if any(_is_same(value, one) for one in restated.get(key, ()))]
    fields.ignore((*private, *same))
    fields.finish()
    return private


def _could_matter(key: str, value: object) -> bool:
    """Return True if the words of a key may name something that a model computes.

    Other keys are ignored, as transformers does.
    """
    if _TRAINING.search(key.lower()):
        return False
    words = [word for word in re.split(r"[\W_]+", key.lower()) if word]
    if words[:1] and words[0] in _SWITCHES and value:
        return True
    return not words or any(word.startswith(_MODELING) or len(word) == 1 for word in words)


def _is_same(value: object, computed: object) -> bool:
    """Compare as JSON does: 1 is 1.0, and true is not 1."""
    return isinstance(value, bool) == isinstance(computed, bool) and value == computed


def _restatements(config: ModelConfig) -> Mapping[str, tuple[object, ...]]:
    """Return the accepted values of keys that families do not read but that restate what is computed."""
    mixture, kinds = config.mixture, config.layer_kinds
    windows = [kind.attention.sliding_window for kind in kinds]
    is_windowed = any(window is not None for window in windows)
    found: dict[str, tuple[object, ...]] = {
        **dict.fromkeys(("hidden_size", "n_embd", "d_model"), (config.hidden_size,)),
        **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), (config.intermediate_size,)),
        **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), (config.num_layers,)),
        **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), (config.num_heads,)),
        **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv"), (config.num_kv_heads,)),
        **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels"), (config.head_dim,)),
        **dict.fromkeys(
            ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length"),
            (config.max_position_embeddings,),
        ),
        **dict.fromkeys(("tie_embeddings", "tie_weights", "tie_word_embeddings"), (config.tie_word_embeddings,)),
        **dict.fromkeys(("causal", "is_causal", "use_causal_mask"), (not config.is_encoder,)),
        "use_sliding_window": (is_windowed,),
        "sliding_window": (0, -1, False) if not is_windowed else tuple(set(windows)) if len(set(windows)) == 1 else (),
        "layer_types": ([FULL if window is None else SLIDING for window in windows],),
        "use_moe": (mixture is not None,),
        **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_layers"), (0,)),
    }
    experts = (0, 0, 0, 0) if mixture is None else (
        mixture.routing.num_experts, mixture.routing.top_k, mixture.width, mixture.shared_width
    )  # fmt: skip
    names = (
        ("num_experts", "num_local_experts", "n_routed_experts"),
        ("num_experts_per_tok", "num_experts_per_token"),
        ("moe_intermediate_size", "expert_intermediate_size"),
        ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    )
    for keys, value in zip(names, experts, strict=True):
        found |= dict.fromkeys(keys, (value,))
    num_shared = experts[3] // experts[2] if experts[2] else 0
    found |= dict.fromkeys(("n_shared_experts", "num_shared_experts"), (num_shared,))
    return found | _restatements_of_decoder(config) if isinstance(config, DecoderConfig) else found


def _restatements_of_decoder(config: DecoderConfig) -> dict[str, tuple[object, ...]]:
    """Return the accepted values of keys that restate choices of `DecoderConfig`."""
    biases = {config.attention_bias, config.attention_output_bias}
    all_biases = biases | {config.mlp_bias}
    has_rope = bool(config.ropes)
    scales = {kind.attention.scale for kind in config.layer_kinds}
    positions = ("rope", "rotary") if has_rope else ("absolute", "learned", "learned_absolute")
    activations = tuple(name for name, found in ACTIVATIONS.items() if found == config.activation)
    return {
        **dict.fromkeys(("qkv_bias", "use_qkv_bias", "add_qkv_bias", "attention_qkv_bias"), (config.attention_bias,)),
        **dict.fromkeys(("attention_output_bias", "attention_out_bias"), (config.attention_output_bias,)),
        "attention_bias": tuple(biases) if len(biases) == 1 else (),
        **dict.fromkeys(("mlp_bias", "ffn_bias"), (config.mlp_bias,)),
        **dict.fromkeys(("bias", "use_bias", "add_bias_linear"), tuple(all_biases) if len(all_biases) == 1 else ()),
        **dict.fromkeys(("qk_norm", "use_qk_norm", "use_qk_layernorm", "qk_layernorm"), (config.qk_norm != "none",)),
        **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), activations),
        **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), (config.norm_eps,)),
        **dict.fromkeys(("use_rope", "use_rotary", "use_rotary_embedding"), (has_rope,)),
        "position_embedding_type": positions,
        **dict.fromkeys(("rope_pct", "rope_percent", "rotary_pct"), tuple({rope.fraction for rope in config.ropes})),
        "rotary_scaling_factor": (1,),
        **dict.fromkeys(("alibi", "use_alibi"), (False,)),
        **dict.fromkeys(("use_parallel_residual", "parallel_attn"), (config.residual != "sequential",)),
        "embedding_multiplier": (config.embed_scale,),
        "residual_multiplier": (config.residual_scale,),
        "logits_scaling": (1 / config.logit_scale,),
        "logit_scale": (config.logit_scale,),
        "attention_multiplier": tuple(scales) if len(scales) == 1 else (),
        "final_logit_softcapping": (config.logit_cap,),
    }


@functools.cache
def _report(keys: tuple[str, ...]) -> None:
    """Log the keys that no code reads, once for each set of them."""
    if keys:
        _LOG.warning("config.json: ignored keys that no model code reads: %s", ", ".join(keys))


def to_hf(config: ModelConfig) -> dict[str, object]:
    """Return the config.json that `from_hf` reads back to an equal value (transformers 5 layout)."""
    family = find_family(config.architecture)
    return {
        "architectures": [config.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": config.bos_token_id,
        "dtype": config.checkpoint_dtype,
    } | family.to_hf(config)


def _architecture(fields: JsonFields) -> str:
    """Return the class that computes the model: by its name, or by model_type as transformers does."""
    names, model_type = fields.value("architectures"), fields.value("model_type")
    of_type = [name for name, family in ARCHITECTURES.items() if family.model_type == model_type]
    if names is None and of_type:
        return of_type[0]
    if names is None and isinstance(model_type, str):
        raise unsupported("model_type", model_type)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise fields.bad("architectures", f"is {names!r}; it must be a list of one name")
    names = [SYNONYMS.get(name, name) for name in names]
    name = next((name for name in names if name in ARCHITECTURES or name in HEADS or name in NAMES), names[0])
    # The layers are those of the model that generates; `jpaged.checkpoints.pooler` reads the head.
    generator = f"{name.removesuffix(CLASSIFIER)}ForCausalLM"
    if name not in ARCHITECTURES and name.endswith(CLASSIFIER) and generator in ARCHITECTURES:
        return generator
    # A model saved without its head: the class with a head computes the same layers.
    if name.endswith("Model") and of_type and _stem(of_type[0]) == _stem(name):
        return of_type[0]
    return name


def _is_classifier(fields: JsonFields) -> bool:
    names = fields.value("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and name.endswith(CLASSIFIER) for name in names)


def _stem(architecture: str) -> str:
    return re.sub("(ForCausalLM|LMHeadModel|Model)$", "", architecture)


def _eos(fields: JsonFields, missing: tuple[int, ...]) -> tuple[int, ...]:
    is_missing = fields.value("eos_token_id", missing) is missing
    return missing if is_missing else fields.token_ids("eos_token_id")


def _bos(fields: JsonFields, missing: int | None) -> int | None:
    is_none = fields.value("bos_token_id", missing) is None
    return None if is_none else fields.integer("bos_token_id", missing, minimum=0)


def _checkpoint_dtype(fields: JsonFields) -> str | None:
    old, new = (fields.value(key) for key in ("torch_dtype", "dtype"))
    value = old if new is None else new
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    name = _NAMES_OF_DTYPES.get(name, name)
    if name == "auto":
        return None
    if name not in ("float32", "bfloat16", "float16"):
        raise Unsupported(f"config.json: dtype is {value!r}; supported: float32, bfloat16, float16")
    return name


def _refuse_other_forms(fields: JsonFields) -> None:
    fields.only("quantization_config", why="quantized checkpoints are not supported; use the original weights")
    fields.only("rope_interleaved", False, why="only half-split rotary embedding is supported")
    fields.only("use_mrope", False, why="multimodal rotary embedding is not supported")
    fields.only("pruned_heads", {}, why="pruned heads are not supported")
    fields.only("chunk_size_feed_forward", 0, why="a chunked feed-forward is not supported; it must be 0")
    for key in ("is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder", "torchscript"):
        fields.only(key, False, why="only decoder-only models are supported")
