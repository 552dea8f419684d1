"""The shape of a DeepSeek model: its fields of config.json, and the leaves of latent attention with their tensors.

Checkpoints have heads' keys and values as one projection of latents. Here it is two: that of keys is applied to
queries, and that of values to the output of attention, so that neither is computed for any token.

    kv_b_proj [H * (N + V), R]  ->  key_up [H, N, R]      q k = q (key_up c) = (q key_up) c
                                    value_up [H, R, V]    sum of p v = (sum of p c) value_up
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jpaged.errors import Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.mixture_kind import Routing
from jpaged.models.config import MAX_LAYERS, MAX_WIDTH, Mixture
from jpaged.models.decoder import DecoderConfig, Names
from jpaged.models.decoder import leaves as decoder
from jpaged.models.decoder.config import QueryScale
from jpaged.models.decoder.config_fields import MAX_EXPERTS, TRAINING, read_sizes
from jpaged.models.decoder.leaves import ExpertNames
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.param_specs import Leaf, same, transpose, transposed
from jpaged.models.rope_config import RopeConfig

_NO_EFFECT = ("head_dim", "qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size", *TRAINING)
_LATER_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys of layers that predict tokens further ahead, for drafts: their tensors are not loaded."""

_EXPERTS = ExpertNames(shared="mlp.shared_experts.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(DecoderConfig):
    """A decoder with latent attention: one key for all query heads, of `head_dim` = latent_dim + rope_dim.

    Attributes:
        query_rank: rank of the query projection; None is a single full projection.
        latent_dim: size of a latent, from which all heads' keys and values are computed.
        nope_dim: dimensions of a query head that are not rotated.
        rope_dim: dimensions of a query head, and of a latent's key, that are rotated.
        v_head_dim: of a head's value.
    """

    query_rank: int | None
    latent_dim: int
    nope_dim: int
    rope_dim: int
    v_head_dim: int

    @property
    def value_dim(self) -> int:
        """See `ModelConfig`. Attention reads latents, and heads' values are computed from sums of them."""
        return self.latent_dim

    @property
    def rotary_dim(self) -> int:
        """See `DecoderConfig`."""
        return self.rope_dim


@dataclass(frozen=True, slots=True)
class Variant:
    """The differences between V2, V3 and their successors, fixed in code.

    Attributes:
        has_choice_bias: experts are chosen by sigmoids with a bias, and groups by their two best; else by a softmax,
            and groups, if there are any, by their best.
        normalises: default of `norm_topk_prob` for experts chosen by a softmax; None does not support it.
        sizes: defaults of config.json for experts, experts per token, an expert's width, latents, heads without and
            with rotation, values, and ranks of queries; None takes those of V2 or V3.
        layer_key: `mlp_layer_types` lists dense and sparse layers; else `first_k_dense_replace` counts the dense ones.
        length: default of `max_position_embeddings`.
        num_groups: defaults of `n_group` and `topk_group`.
        scale: default of `routed_scaling_factor`.
        section: default of `rope_parameters`.
        experts: names of their tensors.
    """

    model_type: str
    has_choice_bias: bool
    normalises: bool | None = None
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    layer_key: Literal["first_k_dense_replace", "mlp_layer_types"] = "first_k_dense_replace"
    length: int | None = None
    num_groups: tuple[int, int] = (8, 4)
    scale: float = 2.5
    num_dense: int | None = None
    eps: float = 1e-6
    ends: tuple[int, int] | None = None
    section: Mapping[str, object] = dataclasses.field(default_factory=dict)
    experts: ExpertNames = _EXPERTS

    def read(self, fields: JsonFields, architecture: str) -> DeepseekConfig:
        """See `Family`."""
        fields.ignore((*_NO_EFFECT, *_LATER_LAYERS))
        sizes = read_sizes(fields)
        num_heads = fields.integer("num_attention_heads", maximum=MAX_WIDTH)
        self._refuse(fields, num_heads)
        length = self.length or (4096 if self.has_choice_bias else 2048)
        max_position_embeddings = fields.integer("max_position_embeddings", length)
        latent_dim = self._size(fields, "kv_lora_rank", 512)
        nope_dim = self._size(fields, "qk_nope_head_dim", 128)
        rope_dim = self._size(fields, "qk_rope_head_dim", 64)
        rope, query_scale = self._rope(fields, max_position_embeddings, rope_dim / (nope_dim + rope_dim))
        attention = AttentionKind((nope_dim + rope_dim) ** -0.5 * _yarn_scale(rope))
        num_layers = sizes["num_layers"]
        num_dense = self._num_dense(fields, num_layers)
        mixture = self._mixture(fields)
        ends = self.ends or ((0, 1) if self.has_choice_bias else (1, 2))
        has_switch = self.has_choice_bias or self.normalises is not None
        return DeepseekConfig(
            architecture=architecture,
            **sizes,
            num_heads=num_heads,
            num_kv_heads=1,
            head_dim=latent_dim + rope_dim,
            norm_eps=fields.number("rms_norm_eps", self.eps),
            ropes=(rope,),
            query_scale=query_scale,
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            eos_token_ids=ends[1:],
            bos_token_id=ends[0],
            kinds=tuple(LayerKind(attention, is_sparse=index >= num_dense) for index in range(num_layers)),
            mixture=mixture if num_dense < num_layers else None,
            query_rank=self._query_rank(fields),
            latent_dim=latent_dim,
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            v_head_dim=self._size(fields, "v_head_dim", 128),
            is_interleaved=fields.flag("rope_interleave", True) if has_switch else True,
        )

    def to_hf(self, config: DeepseekConfig) -> dict[str, object]:
        """See `Family`."""
        result = to_hf(config)
        if self.layer_key == "mlp_layer_types":
            del result["first_k_dense_replace"]
            result["mlp_layer_types"] = ["sparse" if kind.is_sparse else "dense" for kind in config.layer_kinds]
        if self.normalises is not None and not self.has_choice_bias:
            result.pop("topk_method", None)
            result["rope_interleave"] = config.is_interleaved
        if self.section:
            section = config.ropes[0].to_hf()
            if config.query_scale is not None:
                section["llama_4_scaling_beta"] = config.query_scale.beta
            result["rope_parameters"] = section
        return result

    def _size(self, fields: JsonFields, key: str, default: int | None, *, maximum: int = MAX_WIDTH) -> int:
        return fields.integer(key, self.sizes.get(key, default), maximum=maximum)

    def _rope(self, fields: JsonFields, length: int, fraction: float) -> tuple[RopeConfig, QueryScale | None]:
        """Read the rope, and the scale of queries that Mistral 4 has in its section."""
        if not self.section:
            return RopeConfig.from_hf(fields, length), None
        section = fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or self.section
        rope = JsonFields(section, f"{fields.name} rope_parameters")
        rope.ignore(("max_position_embeddings",))
        rope.only("partial_rotary_factor", fraction, why=f"the dimensions of heads make it {fraction:g}")
        scale = None
        if rope.has("llama_4_scaling_beta"):
            period = rope.integer("original_max_position_embeddings")
            scale = QueryScale(rope.number("llama_4_scaling_beta"), period)
        return RopeConfig.of_section(rope, length, fields.number("rope_theta", 10000.0)), scale

    def _num_dense(self, fields: JsonFields, num_layers: int) -> int:
        """Read the number of dense layers, which come first."""
        default = 3 * self.has_choice_bias if self.num_dense is None else self.num_dense
        if self.layer_key == "first_k_dense_replace":
            return fields.integer("first_k_dense_replace", default, minimum=0, maximum=MAX_LAYERS)
        fields.ignore(("first_k_dense_replace",))
        types = fields.texts("mlp_layer_types", "dense", "sparse", count=num_layers)
        if not types:
            return default
        if list(types) != sorted(types):
            raise Unsupported(f"{fields.name}: mlp_layer_types has a dense layer after a sparse one")
        return types.count("dense")

    def _query_rank(self, fields: JsonFields) -> int | None:
        default = self.sizes.get("q_lora_rank", 1536)
        return None if fields.value("q_lora_rank", default) is None else self._size(fields, "q_lora_rank", 1536)

    def _refuse(self, fields: JsonFields, num_heads: int) -> None:
        """Refuse settings that are not supported."""
        fields.only("hidden_act", "silu", "swish", why="experts support only the activation silu")
        fields.only("num_key_value_heads", num_heads, why="all query heads share the same latents")
        fields.only("attention_bias", False, why="biases in attention are not supported")
        fields.only("mlp_bias", False, why="biases in the feed-forward are not supported")
        fields.only("moe_layer_freq", 1, why="every layer after the dense ones has experts")
        scores = "sigmoid" if self.has_choice_bias else "softmax"
        fields.only("scoring_func", scores, why=f"{self.model_type} scores experts by a {scores}")

    def _mixture(self, fields: JsonFields) -> Mixture:
        num_experts = self._size(fields, "n_routed_experts", 256 if self.has_choice_bias else 64, maximum=MAX_EXPERTS)
        top_k = self._size(fields, "num_experts_per_tok", 8 if self.has_choice_bias else None, maximum=num_experts)
        width = self._size(fields, "moe_intermediate_size", 2048 if self.has_choice_bias else 1407)
        is_second = not self.has_choice_bias and self.normalises is None
        num_shared = fields.integer("n_shared_experts", 2 if is_second else 1, minimum=0)
        if self.has_choice_bias:
            fields.only("topk_method", "noaux_tc", why="experts are chosen with a bias")
            routing = Routing(
                num_experts,
                top_k,
                "sigmoid",
                normalises=fields.flag("norm_topk_prob", True),
                scale=fields.number("routed_scaling_factor", self.scale),
                num_groups=fields.integer("n_group", self.num_groups[0]),
                top_groups=fields.integer("topk_group", self.num_groups[1]),
                num_best=2,
            )
        elif self.normalises is not None:
            routing = Routing(
                num_experts,
                top_k,
                normalises=fields.flag("norm_topk_prob", self.normalises),
                scale=fields.number("routed_scaling_factor", self.scale),
                num_groups=fields.integer("n_group", self.num_groups[0]),
                top_groups=fields.integer("topk_group", self.num_groups[1]),
                num_best=2,
            )
        else:
            fields.only("norm_topk_prob", False, why="normalized expert weights are not supported")
            num_groups, top_groups = _groups(fields)
            routing = Routing(
                num_experts,
                top_k,
                scale=fields.number("routed_scaling_factor", 1.0),
                num_groups=num_groups,
                top_groups=top_groups,
            )
        return Mixture(routing=routing, width=width, choice_bias=self.has_choice_bias, shared_width=num_shared * width)


def to_hf(config: DeepseekConfig) -> dict[str, object]:
    """See `Family`."""
    result: dict[str, object] = {
        "intermediate_size": config.intermediate_size,
        "num_key_value_heads": config.num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": config.ropes[0].to_hf(),
        "q_lora_rank": config.query_rank,
        "kv_lora_rank": config.latent_dim,
        "qk_nope_head_dim": config.nope_dim,
        "qk_rope_head_dim": config.rope_dim,
        "v_head_dim": config.v_head_dim,
        "first_k_dense_replace": sum(not kind.is_sparse for kind in config.layer_kinds),
    }
    mixture = config.mixture
    if mixture is None:
        return result | {"num_experts_per_tok": 1}
    routing = mixture.routing
    result |= {
        "moe_intermediate_size": mixture.width,
        "n_shared_experts": mixture.shared_width // mixture.width,
        "n_routed_experts": routing.num_experts,
        "num_experts_per_tok": routing.top_k,
        "norm_topk_prob": routing.normalises,
        "routed_scaling_factor": routing.scale,
        "n_group": routing.num_groups,
        "topk_group": routing.top_groups,
    }
    if mixture.choice_bias:
        return result | {"rope_interleave": config.is_interleaved}
    return result | {"topk_method": "greedy" if routing.num_groups == 1 else "group_limited_greedy"}


def _groups(fields: JsonFields) -> tuple[int, int]:
    """Read (groups, groups that a row may choose experts from), of DeepSeek-V2."""
    method = fields.text("topk_method", "greedy")
    if method == "greedy":
        fields.ignore(("n_group", "topk_group"))
        return 1, 1
    if method != "group_limited_greedy":
        raise Unsupported(f"{fields.name}: topk_method is {method!r}; supported: greedy, group_limited_greedy")
    return fields.integer("n_group"), fields.integer("topk_group")


def _yarn_scale(rope: RopeConfig) -> float:
    """Return the factor of attention scores for YaRN, in addition to the factor in its cosines."""
    weight: Any = rope.mscale_all_dim
    if rope.kind != "yarn" or weight is None or rope.factor <= 1:
        return 1.0
    return (0.1 * float(weight) * math.log(rope.factor) + 1.0) ** 2


_MISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
GLM = Variant(
    "glm4_moe_lite",
    has_choice_bias=True,
    sizes={
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
    layer_key="mlp_layer_types",
    length=202752,
    num_groups=(1, 1),
    scale=1.8,
    num_dense=1,
    eps=1e-5,
)
"""GLM-4.7-Flash."""
MISTRAL = Variant(
    "mistral4",
    has_choice_bias=False,
    normalises=True,
    sizes={
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 2048,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
    },
    length=1048576,
    num_groups=(1, 1),
    scale=1.0,
    num_dense=0,
    ends=(1, 2),
    section=_MISTRAL_ROPE,
    experts=dataclasses.replace(_EXPERTS, gate="gate_up_proj", fused="rows"),
)
"""Mistral 4."""
NAMES = Names()


def layer_leaves(config: DeepseekConfig, prefix: str, kind: LayerKind, experts: ExpertNames = _EXPERTS) -> list[Leaf]:
    """See `Family`."""
    names = Names(experts=experts)
    return decoder.layer_leaves(config, prefix, kind, names, attention=attention_leaves(config, f"{prefix}self_attn."))


def attention_leaves(config: DeepseekConfig, prefix: str) -> list[Leaf]:
    """Return the leaves of latent attention, from tensors with this prefix."""
    width, rank, values = config.hidden_size, config.query_rank, config.num_heads * config.v_head_dim
    leaves = [
        _queries(config, f"{prefix}{'q_proj' if rank is None else 'q_b_proj'}.weight", rank or width),
        _latents(config, f"{prefix}kv_a_proj_with_mqa.weight"),
        _norm("kv_norm", f"{prefix}kv_a_layernorm.weight", config.latent_dim),
        *_ups(config, f"{prefix}kv_b_proj.weight"),
        transposed(
            ("attention", "out", "kernel"), f"{prefix}o_proj.weight", (_heads(config), "embed"), (values, width)
        ),
    ]
    if rank is not None:
        down = ("attention", "q_down", "kernel")
        leaves.append(transposed(down, f"{prefix}q_a_proj.weight", ("embed", None), (width, rank)))
        leaves.append(_norm("q_norm", f"{prefix}q_a_layernorm.weight", rank))
    return leaves


def _heads(config: DeepseekConfig) -> str | None:
    """Return the axis name of heads; None if each device has all of them."""
    return None if config.has_dp_attention else "heads"


def _norm(part: str, name: str, width: int) -> Leaf:
    return same(("attention", part, "scale"), name, (None,), (width,))


def _queries(config: DeepseekConfig, name: str, width: int) -> Leaf:
    """Return the projection of queries `[H * (N + R), width]` -> `[width, H * (N + R)]`."""
    num_heads, dim = config.num_heads, config.nope_dim + config.rope_dim
    order = _rotated_by_halves(config, config.nope_dim)

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        for index, rows in enumerate(tensors[0].reshape(-1, dim, tensors[0].shape[1])):
            transpose(rows[order], leaf[:, index * dim : (index + 1) * dim])

    axes = (None if config.query_rank else "embed", _heads(config))
    tensors = ((name, (num_heads * dim, width)),)
    return Leaf(("attention", "q", "kernel"), axes, (width, num_heads * dim), tensors, pack, (1, 0))


def _latents(config: DeepseekConfig, name: str) -> Leaf:
    """Return the projection of latents `[D, E]` -> `[E, D]`."""
    width, order = config.hidden_size, _rotated_by_halves(config, config.latent_dim)

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        transpose(tensors[0][order], leaf)

    tensors = ((name, (config.head_dim, width)),)
    path = ("attention", "kv_down", "kernel")
    return Leaf(path, ("embed", None), (width, config.head_dim), tensors, pack, (1, None))


def _ups(config: DeepseekConfig, name: str) -> list[Leaf]:
    """Return the two leaves of one tensor."""
    num_heads, rank, nope, v_dim = config.num_heads, config.latent_dim, config.nope_dim, config.v_head_dim
    tensors, axes = ((name, (num_heads * (nope + v_dim), rank)),), (_heads(config), None, None)

    def pack_keys(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        leaf[...] = tensors[0].reshape(-1, nope + v_dim, rank)[:, :nope]

    def pack_values(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        leaf[...] = tensors[0].reshape(-1, nope + v_dim, rank)[:, nope:].swapaxes(1, 2)

    key, value = ("attention", "key_up"), ("attention", "value_up")
    return [
        Leaf(key, axes, (num_heads, nope, rank), tensors, pack_keys, (0, None, 1)),
        Leaf(value, axes, (num_heads, rank, v_dim), tensors, pack_values, (0, 1, None)),
    ]


def _rotated_by_halves(config: DeepseekConfig, first: int) -> np.ndarray:
    """Return an order of dimensions in which those from `first` on rotate half against half; see `rotated_first`."""
    rotated = np.arange(config.rope_dim)
    if config.is_interleaved:
        rotated = np.concatenate((rotated[::2], rotated[1::2]))
    return np.concatenate((np.arange(first), first + rotated))
