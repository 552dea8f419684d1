"""A model's config, read from a Hugging Face config.json and written to one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jpaged.errors import Unsupported
from jpaged.models.config import ModelConfig
from jpaged.models.heads import HEADS, NAMES, EagleConfig
from jpaged.models.json_fields import JsonFields
from jpaged.models.registry import find_family

# Keys that say nothing about what the model computes in inference.
_HARMLESS = (
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_experts_implementation",
    "_flash_attn_2_enabled",
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
    "model_type",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
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
)

# Sampling defaults of old checkpoints, as transformers 5 sets them aside: a request states its own.
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


def from_hf(config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> ModelConfig:
    """Reads a Hugging Face config.json; the result is of the architecture's subclass.

    Args:
        generation: the parsed generation_config.json beside it. Only its `eos_token_id` is read, which wins
            over that of config.json, as in transformers' generate; its sampling defaults belong to requests.
            Where neither has the key, the family's is taken; null is none.

    Raises:
        Unsupported: an architecture or a setting that this model code does not compute.
        InvalidArgument: a missing or malformed value.
    """
    whole = JsonFields(config, "config.json")
    architecture = _architecture(whole)
    if architecture in HEADS:
        raise Unsupported(f"{architecture} proposes tokens for another model, and is served beside it alone")
    return _read(whole, architecture, generation)


def head_from_hf(config: Mapping[str, object]) -> EagleConfig:
    """Reads the config.json of an EAGLE-3 head; which tensors it has is not known yet.

    Raises:
        Unsupported: another kind of head, or a setting that this model code does not compute.
        InvalidArgument: a missing or malformed value.
    """
    whole = JsonFields(config, "config.json")
    name = _architecture(whole)
    if name not in NAMES:
        raise Unsupported(f"{name!r} is no EAGLE-3 head that is supported; supported: {', '.join(NAMES)}")
    result = _read(whole, NAMES[name], None)
    assert isinstance(result, EagleConfig)
    return result


def _read(whole: JsonFields, architecture: str, generation: Mapping[str, object] | None) -> ModelConfig:
    family = find_family(architecture)
    fields = whole if family.language is None else family.language(whole)
    for part in (whole, fields):
        part.ignore(_HARMLESS + _GENERATION_DEFAULTS)
        _refuse_other_forms(part)
    known: ModelConfig = family.read(fields, architecture)
    eos = _eos(fields, known.eos_token_ids)
    generation_eos = JsonFields(generation or {}, "generation_config.json").token_ids("eos_token_id")
    result = replace(
        known,
        eos_token_ids=generation_eos or eos,
        bos_token_id=_bos(fields, known.bos_token_id),
        checkpoint_dtype=_checkpoint_dtype(fields),
    )
    for part in (whole, fields):
        part.finish()
    return result


def to_hf(config: ModelConfig) -> dict[str, object]:
    """The config.json that `from_hf` reads back to an equal value (transformers 5 layout)."""
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
    names = fields.value("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.bad("architectures", f"is {names!r}; it must be a list of one name")
    return names[0]


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
    if name not in ("float32", "bfloat16", "float16"):
        raise Unsupported(f"config.json: dtype is {value!r}; supported: float32, bfloat16, float16")
    return name


def _refuse_other_forms(fields: JsonFields) -> None:
    fields.only("quantization_config", why="quantised checkpoints are not supported; take the original weights")
    fields.only("pretraining_tp", 0, 1, why="split projections are not supported; only 1 is")
    fields.only("rope_interleaved", False, why="only half-split rotary embedding is supported")
    fields.only("use_mrope", False, why="multimodal rotary embedding is not supported")
    fields.only("pruned_heads", {}, why="layers without some of their heads are not supported")
    fields.only("chunk_size_feed_forward", 0, why="a chunked feed-forward is not supported; only 0 is")
    for key in ("is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder", "torchscript"):
        fields.only(key, False, why="only decoder-only models are supported")
