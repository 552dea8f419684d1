"""Encoders: models whose tokens see later ones, for embeddings and classification.

BERT (Devlin et al. 2018) has learned positions and token types, and normalizes the sums of a layer. RoBERTa (Liu et al.
2019) and XLM-RoBERTa are the same, except that positions begin after the padding token's row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jpaged.kernels.attention_kind import AttentionKind
from jpaged.models.config import MAX_VOCAB_SIZE
from jpaged.models.decoder import DecoderConfig, Names, decoder_family
from jpaged.models.decoder.config_fields import divided_heads, name_of_activation, read_activation, read_sizes
from jpaged.models.family import Family
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind

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


_BERT = _family("bert", _read_bert, "bert.")
_ROBERTA = _family("roberta", _read_roberta, "roberta.")
_XLM_ROBERTA = _family("xlm-roberta", _read_roberta, "roberta.")

ARCHITECTURES = {
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
