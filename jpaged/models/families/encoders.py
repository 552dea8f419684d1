"""Encoders: models whose tokens see later ones, for embeddings and classification.

BERT (Devlin et al. 2018) has learned positions and token types, and normalizes the sums of a layer. RoBERTa (Liu et al.
2019) and XLM-RoBERTa are the same, except that positions begin after the padding token's row. Nomic's BERT (Nussbaum et
al. 2024) rotates heads and has a gated feed-forward. ModernBERT (Warner et al. 2024) also normalizes inputs, and two of
three layers see a window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from jpaged.kernels.attention_kind import AttentionKind
from jpaged.models.config import MAX_LAYERS, MAX_VOCAB_SIZE, MAX_WIDTH
from jpaged.models.decoder import DecoderConfig, Names, decoder_family
from jpaged.models.decoder.config_fields import (
    FULL,
    SLIDING,
    divided_heads,
    name_of_activation,
    read_activation,
    read_sizes,
)
from jpaged.models.family import Family
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.rope_config import RopeConfig

# Settings of heads of pretraining, and of pooling modules that no published checkpoint of these classes has.
_HARMLESS = (
    "adapters",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "directionality",
    "hidden_dropout_prob",
    "output_past",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    # Activations of classifiers, which are read with their heads.
    "sbert_ce_default_activation_function",
    "sentence_transformers",
)


def _read_bert(fields: JsonFields, architecture: str) -> DecoderConfig:
    return _read(fields, architecture, 0)


def _read_roberta(fields: JsonFields, architecture: str) -> DecoderConfig:
    return _read(fields, architecture, 1 + fields.integer("pad_token_id", 1, minimum=0))


def _read(fields: JsonFields, architecture: str, position_offset: int) -> DecoderConfig:
    fields.ignore(_HARMLESS)
    fields.only("position_embedding_type", "absolute", why="other position embeddings of encoders are not supported")
    sizes = read_sizes(fields)
    num_heads = fields.integer("num_attention_heads")
    head_dim = divided_heads(fields, sizes["hidden_size"], num_heads)
    num_positions = fields.integer("max_position_embeddings", 512, minimum=position_offset + 2, maximum=MAX_VOCAB_SIZE)
    return DecoderConfig(
        architecture=architecture,
        **sizes,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_position_embeddings=num_positions,
        num_positions=num_positions - position_offset,
        position_offset=position_offset,
        num_token_types=fields.integer("type_vocab_size", 2, minimum=0, maximum=MAX_VOCAB_SIZE),
        embed_norm=True,
        tie_word_embeddings=True,
        norm="layer",
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        residual="post",
        pre_norms=False,
        post_norms=True,
        final_norm=False,
        activation=read_activation(fields, "hidden_act", "gelu"),
        is_gated=False,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        kinds=(LayerKind(AttentionKind(head_dim**-0.5, is_causal=False), None),) * sizes["num_layers"],
    )


def _to_hf(config: DecoderConfig) -> dict[str, object]:
    return {
        "intermediate_size": config.intermediate_size,
        "hidden_act": name_of_activation(config.activation),
        "layer_norm_eps": config.norm_eps,
        "type_vocab_size": config.num_token_types,
        "pad_token_id": max(0, config.position_offset - 1),
    }


def _read_nomic(fields: JsonFields, architecture: str) -> DecoderConfig:
    """Read a config by the names of transformers, or by those of GPT-2, as published."""
    fields.ignore((*_HARMLESS, *_NOMIC_HARMLESS))
    fields.only("prenorm", False, why="norms before attention are not supported")
    fields.only("use_rms_norm", False, None, why="its norms are layer norms")
    fields.only("rotary_emb_fraction", 1, 1.0, why="only full rotary embedding of a head is supported")
    fields.only("rotary_emb_interleaved", False, why="only half-split rotary embedding is supported")
    for name in ("rotary_emb_scale_base", "rotary_scaling_factor"):
        fields.only(name, None, why="scaled positions are not supported")
    for name in ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "parallel_block"):
        fields.only(name, False, why="only the published form is supported")
    fields.only("scale_attn_by_inverse_layer_idx", False, why="layers have the same scale")
    fields.only("scale_attn_weights", True, why="scores are scaled")
    fields.only("activation_function", "swiglu", why="the feed-forward has a gate with SiLU")
    width = _either(fields, "n_embd", "hidden_size", MAX_WIDTH)
    num_layers = _either(fields, "n_layer", "num_hidden_layers", MAX_LAYERS)
    num_heads = _either(fields, "n_head", "num_attention_heads", MAX_WIDTH)
    num_positions = _either(fields, "n_positions", "max_position_embeddings", MAX_VOCAB_SIZE)
    num_positions = min(num_positions, fields.integer("max_trained_positions", num_positions))
    head_dim = divided_heads(fields, width, num_heads)
    eps = "layer_norm_epsilon" if fields.has("layer_norm_epsilon") else "layer_norm_eps"
    theta = fields.number("rotary_emb_base", 1000.0)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", maximum=MAX_VOCAB_SIZE),
        hidden_size=width,
        intermediate_size=_either(fields, "n_inner", "intermediate_size", MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_position_embeddings=num_positions,
        num_token_types=fields.integer("type_vocab_size", 2, minimum=0, maximum=MAX_VOCAB_SIZE),
        embed_norm=True,
        tie_word_embeddings=True,
        norm="layer",
        norm_eps=fields.number(eps, 1e-12),
        residual="post",
        pre_norms=False,
        post_norms=True,
        final_norm=False,
        activation=read_activation(fields, "hidden_act", "silu"),
        ropes=(RopeConfig.from_hf(fields, num_positions, default_theta=theta),),
        kinds=(LayerKind(AttentionKind(head_dim**-0.5, is_causal=False)),) * num_layers,
    )


def _either(fields: JsonFields, old: str, usual: str, maximum: int) -> int:
    return fields.integer(old if fields.has(old) else usual, maximum=maximum)


def _nomic_to_hf(config: DecoderConfig) -> dict[str, object]:
    return {
        "intermediate_size": config.intermediate_size,
        "hidden_act": name_of_activation(config.activation),
        "layer_norm_eps": config.norm_eps,
        "type_vocab_size": config.num_token_types,
        "rope_parameters": config.ropes[0].to_hf(),
    }


def _read_modern(fields: JsonFields, architecture: str) -> DecoderConfig:
    fields.ignore((*_HARMLESS, *_MODERN_HARMLESS))
    sizes = read_sizes(fields)
    num_heads, num_layers = fields.integer("num_attention_heads"), sizes["num_layers"]
    head_dim = divided_heads(fields, sizes["hidden_size"], num_heads)
    num_positions = fields.integer("max_position_embeddings", 8192)
    period = fields.integer("global_attn_every_n_layers", 3)
    types = fields.texts("layer_types", FULL, SLIDING, count=num_layers)
    types = types or tuple(SLIDING if index % period else FULL for index in range(num_layers))
    window = 1 + 2 * (fields.integer("local_attention", 128) // 2)
    scale = head_dim**-0.5
    kinds = {
        FULL: LayerKind(AttentionKind(scale, is_causal=False), 0),
        SLIDING: LayerKind(AttentionKind(scale, window, is_causal=False), 1),
    }
    has_bias = fields.flag("attention_bias", False)
    of_layers = [kinds[name] for name in types]
    return DecoderConfig(
        architecture=architecture,
        **sizes,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_position_embeddings=num_positions,
        embed_norm=True,
        tie_word_embeddings=True,
        norm="layer",
        norm_eps=fields.number("norm_eps", 1e-5),
        norm_bias=fields.flag("norm_bias", False),
        activation=read_activation(fields, "hidden_activation", "gelu"),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        ropes=_modern_ropes(fields, num_positions),
        kinds=(dataclasses.replace(of_layers[0], has_norm=False), *of_layers[1:]),
    )


def _modern_ropes(fields: JsonFields, num_positions: int) -> tuple[RopeConfig, RopeConfig]:
    """Read the rotary embeddings of layers that see everything, and of those with a window."""
    sections = JsonFields(fields.mapping("rope_parameters"), f"{fields.name} rope_parameters")
    thetas = {FULL: fields.number("global_rope_theta", 160000.0), SLIDING: fields.number("local_rope_theta", 10000.0)}
    full, sliding = (
        RopeConfig.of_section(JsonFields(sections.mapping(name), f"{sections.name} {name}"), num_positions, theta)
        for name, theta in thetas.items()
    )
    return full, sliding


def _modern_to_hf(config: DecoderConfig) -> dict[str, object]:
    windows = [kind.sliding_window for kind in config.attention_kinds]
    window = next((window for window in windows if window is not None), 1)
    return {
        "intermediate_size": config.intermediate_size,
        "hidden_activation": name_of_activation(config.activation),
        "norm_eps": config.norm_eps,
        "norm_bias": config.norm_bias,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "local_attention": window - 1,
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "rope_parameters": {name: rope.to_hf() for name, rope in zip((FULL, SLIDING), config.ropes, strict=True)},
    }


def _prefixed(prefix: str) -> Callable[[Iterable[str]], str]:
    """Return the prefix of checkpoints with a head; those without one have none."""
    return lambda stored: prefix if any(name.startswith(prefix) for name in stored) else ""


_BERT_NAMES = Names(
    embed="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    token_types="embeddings.token_type_embeddings",
    embed_norm="embeddings.LayerNorm",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    attention_post_norm="attention.output.LayerNorm",
    gate_up=("intermediate.dense",),
    down="output.dense",
    mlp_post_norm="output.LayerNorm",
)


def _family(model_type: str, read: Callable[[JsonFields, str], DecoderConfig], prefix: str) -> Family[DecoderConfig]:
    return decoder_family(
        model_type,
        read,
        _to_hf,
        _BERT_NAMES,
        name_prefix=_prefixed(prefix),
        layers_prefix="encoder.layer.",
        # Heads: of pretraining, of classification, and the pooler's, which embeddings do not read.
        ignored=("pooler.", "cls.", "lm_head.", "classifier.", "embeddings.position_ids"),
    )


_NOMIC_HARMLESS = (
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln"),
    *("last_layer_subset", "pad_vocab_size_multiple", "parallel_block_tied_norm", "reorder_and_upcast_attn"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    *("use_xentropy", "causal"),
)
_MODERN_HARMLESS = (
    *("classifier_activation", "classifier_bias", "classifier_pooling", "cls_token_id", "decoder_bias"),
    *("deterministic_flash_attn", "embedding_dropout", "initializer_cutoff_factor", "layer_norm_eps", "mlp_dropout"),
    *("position_embedding_type", "reference_compile", "repad_logits_with_grad", "sliding_window"),
    *("sparse_pred_ignore_index", "sparse_prediction"),
)
_NOMIC = decoder_family(
    "nomic_bert",
    _read_nomic,
    _nomic_to_hf,
    Names(
        embed="embeddings.word_embeddings",
        token_types="embeddings.token_type_embeddings",
        embed_norm="emb_ln",
        qkv=("attn.Wqkv",),
        out="attn.out_proj",
        attention_post_norm="norm1",
        gate_up=("mlp.fc12", "mlp.fc11"),
        down="mlp.fc2",
        mlp_post_norm="norm2",
    ),
    name_prefix=_prefixed("bert."),
    layers_prefix="encoder.layers.",
    ignored=("pooler.", "cls."),
)
_MODERN_BERT = decoder_family(
    "modernbert",
    _read_modern,
    _modern_to_hf,
    Names(
        embed="embeddings.tok_embeddings",
        embed_norm="embeddings.norm",
        norm="final_norm",
        attention_norm="attn_norm",
        mlp_norm="mlp_norm",
        qkv=("attn.Wqkv",),
        out="attn.Wo",
        gate_up=("mlp.Wi",),
        down="mlp.Wo",
    ),
    name_prefix=_prefixed("model."),
    ignored=("head.", "decoder.", "classifier."),
)
_BERT = _family("bert", _read_bert, "bert.")
_ROBERTA = _family("roberta", _read_roberta, "roberta.")
_XLM_ROBERTA = _family("xlm-roberta", _read_roberta, "roberta.")

ARCHITECTURES = {
    "ModernBertModel": _MODERN_BERT,
    "ModernBertForMaskedLM": _MODERN_BERT,
    "ModernBertForSequenceClassification": _MODERN_BERT,
    "NomicBertModel": _NOMIC,
    "BertModel": _BERT,
    "BertForMaskedLM": _BERT,
    "BertForSequenceClassification": _BERT,
    "RobertaModel": _ROBERTA,
    "RobertaForMaskedLM": _ROBERTA,
    "RobertaForSequenceClassification": _ROBERTA,
    "XLMRobertaModel": _XLM_ROBERTA,
    "XLMRobertaForMaskedLM": _XLM_ROBERTA,
    "XLMRobertaForSequenceClassification": _XLM_ROBERTA,
}
