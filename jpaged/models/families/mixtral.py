"""Mixtral (Mistral 2023): a Mistral with experts in every layer, of which each token uses two."""

from __future__ import annotations

from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.mixture_kind import Routing
from jpaged.models.config import Mixture
from jpaged.models.decoder import DecoderConfig, Names, decoder_family
from jpaged.models.decoder.config_fields import TRAINING, read_choice, read_heads, read_sizes, read_window
from jpaged.models.decoder.leaves import ExpertNames
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.rope_config import RopeConfig


def _read(fields: JsonFields, architecture: str) -> DecoderConfig:
    fields.ignore(TRAINING)
    sizes = read_sizes(fields)
    heads = read_heads(fields, sizes["hidden_size"], num_kv_heads=8)
    fields.only("hidden_act", "silu", "swish", why="experts support only the activation silu")
    max_position_embeddings = fields.integer("max_position_embeddings", 131072)
    num_experts, top_k = read_choice(fields, (8, 2))
    routing = Routing(num_experts, top_k, normalises=True)
    attention = AttentionKind(heads["head_dim"] ** -0.5, sliding_window=read_window(fields))
    return DecoderConfig(
        architecture=architecture,
        **sizes,
        **heads,
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        ropes=(RopeConfig.from_hf(fields, max_position_embeddings, default_theta=1e6),),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=(2,),
        bos_token_id=1,
        kinds=(LayerKind(attention, is_sparse=True),) * sizes["num_layers"],
        mixture=Mixture(routing=routing, width=sizes["intermediate_size"]),
    )


def _to_hf(config: DecoderConfig) -> dict[str, object]:
    assert config.mixture is not None
    return {
        "intermediate_size": config.intermediate_size,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": config.ropes[0].to_hf(),
        "sliding_window": config.attention_kinds[0].sliding_window,
        "num_local_experts": config.mixture.routing.num_experts,
        "num_experts_per_tok": config.mixture.routing.top_k,
    }


_EXPERTS = ExpertNames(
    router="block_sparse_moe.gate", experts="block_sparse_moe.experts.", gate="w1", up="w3", down="w2"
)

ARCHITECTURES = {"MixtralForCausalLM": decoder_family("mixtral", _read, _to_hf, Names(experts=_EXPERTS))}
