"""The shapes of heads and their leaves, with the tensors in a checkpoint; EAGLE-3's fields of config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.config import MAX_LAYERS, MAX_VOCAB_SIZE, MAX_WIDTH, ModelConfig
from jpaged.models.decoder import DecoderConfig
from jpaged.models.decoder.leaves import Names, feed_forward, norm_leaves
from jpaged.models.families.llama import LlamaVariant
from jpaged.models.families.qwen_next import FUSED_MTP
from jpaged.models.json_fields import MAX_INTEGER, JsonFields
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.param_specs import (
    LM_HEAD,
    Leaf,
    Linears,
    embedding,
    qkv_bias,
    qkv_kernel,
    same,
    split_projections,
    stacked_kernel,
    transposed,
    whole,
)

ARCHITECTURE = "Eagle3LlamaForCausalLM"
NUM_WATCHED = 3
_LLAMA = LlamaVariant("llama", "config", True, False, "none", None, None, 2048, None)
_HARMLESS = ("max_window_layers", "tie_word_embeddings", "target_model_type", "modal_type")


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(DecoderConfig):
    """A head of one Llama layer; its vocabulary is the model's, of which it may propose a part.

    Attributes:
        draft_vocab_size: tokens that it may propose.
        target_hidden_size: width of the model's hidden states.
        norm_before_residual: the layer's residual input is normalized, too.
        watched: numbers of the model's layers whose input it takes; None is the choice of the paper's authors.
        has_embedding: it has an embedding; otherwise it uses the model's.
        has_ids: a tensor lists the tokens that it proposes; otherwise it may propose all.
        layer_name: prefix of the layer's tensors.
    """

    draft_vocab_size: int
    target_hidden_size: int
    norm_before_residual: bool = False
    watched: tuple[int, ...] | None = None
    has_embedding: bool = True
    has_ids: bool = True
    layer_name: str = "midlayer"

    @property
    def max_model_len(self) -> int:
        """See `ModelConfig`. Rotary positions have no limit, but long sequences seldom have proposals accepted."""
        return MAX_INTEGER

    def stored_as(self, names: Collection[str]) -> EagleConfig:
        """Return the head of a checkpoint with tensors of these names."""
        return dataclasses.replace(
            self,
            has_embedding="embed_tokens.weight" in names,
            has_ids="d2t" in names or self.draft_vocab_size < self.vocab_size,
            layer_name="layers.0" if any(name.startswith("layers.0.") for name in names) else "midlayer",
        )

    def get_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers of a model whose input it takes; the number of layers stands for the last one's output.

        Raises:
            InvalidArgument: the model has no such layers.
        """
        found = (2, num_layers // 2, num_layers - 3) if self.watched is None else self.watched
        if not all(0 <= number <= num_layers for number in found):
            raise InvalidArgument(
                "eagle_aux_hidden_state_layer_ids",
                f"the head uses the input of layers {', '.join(map(str, found))}, but the model has {num_layers}",
            )
        return found

    def to_hf(self) -> dict[str, object]:
        """See `Family`."""
        own: dict[str, object] = {
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "norm_before_residual": self.norm_before_residual,
        }
        if self.watched is not None:
            own["eagle_aux_hidden_state_layer_ids"] = list(self.watched)
        return _LLAMA.to_hf(self) | own


def read(fields: JsonFields, architecture: str) -> EagleConfig:
    """See `Family`."""
    fields.ignore(_HARMLESS)
    fields.only("use_sliding_window", False, why="heads with a window are not supported")
    fields.only("sliding_window", None, why="heads with a window are not supported")
    fields.only("num_hidden_layers", 1, why="only EAGLE-3 heads with 1 layer are supported")
    base = _LLAMA.read(fields, architecture)
    vocab_size = base.vocab_size
    draft_vocab_size = fields.integer("draft_vocab_size", vocab_size, maximum=MAX_VOCAB_SIZE)
    if draft_vocab_size > vocab_size:
        raise fields.bad("draft_vocab_size", f"is {draft_vocab_size}, above vocab_size, {vocab_size}")
    values = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    return EagleConfig(
        **values | {"tie_word_embeddings": False},
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=fields.integer("target_hidden_size", base.hidden_size, maximum=MAX_WIDTH),
        norm_before_residual=fields.flag("norm_before_residual", False),
        watched=_watched(fields),
    )


def _watched(fields: JsonFields) -> tuple[int, ...] | None:
    """Read the layers whose input the head takes; None if config.json has none.

    Numbers at the top level (vLLM) refer to a layer's input, those in `eagle_config` (SGLang) to its output.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    inner = JsonFields(fields.mapping("eagle_config"), f"{fields.name} eagle_config")
    inner.only("use_aux_hidden_state", True, why="heads that use only the last hidden state are not supported")
    inner.only("use_input_layernorm_in_first_layer", True, why="only normalized embeddings are supported")
    inner.only("use_last_layernorm", True, why="only a norm before the output matrix is supported")
    inner.only("use_mtp_layernorm", False, why="only EAGLE-3 is supported")
    inner.only("parallel_draft_step", 1, why="parallel proposals are not supported")
    by_input, by_output = fields.token_ids(key), inner.token_ids(key)
    inner.finish()
    found = by_input or tuple(number + 1 for number in by_output)
    if not found:
        return None
    if len(found) != NUM_WATCHED or max(found) > MAX_LAYERS:
        raise Unsupported(f"{fields.name}: {key} is {list(by_input or by_output)}; it must list {NUM_WATCHED} layers")
    return found


IDS = "d2t"
"""A tensor: for each token that a head proposes, the difference between the model's id and the head's."""


def outer_leaves(config: EagleConfig, prefix: str) -> list[Leaf]:
    """See `Family`. The embedding, if any, comes first."""
    width, inner = config.hidden_size, NUM_WATCHED * config.target_hidden_size
    leaves = [embedding(config, width, f"{prefix}embed_tokens.weight")] if config.has_embedding else []
    leaves += [
        transposed(("fc", "kernel"), f"{prefix}fc.weight", ("heads", "embed"), (inner, width)),
        *norm_leaves(config, ("norm",), f"{prefix}norm"),
        same(("lm_head", "embedding"), LM_HEAD, ("vocab", "embed"), (config.draft_vocab_size, width)),
    ]
    return [*leaves, _ids(config)] if config.has_ids else leaves


def layer_leaves(config: EagleConfig, prefix: str, kind: LayerKind) -> list[Leaf]:
    """See `Family`."""
    prefix, width, names = f"{config.layer_name}.", config.hidden_size, Names()
    both = dataclasses.replace(config, hidden_size=2 * width)
    projections, out = split_projections(f"{prefix}self_attn."), Linears((f"{prefix}{names.out}",))
    num_numbers = config.num_heads * config.head_dim
    leaves = [
        *norm_leaves(config, ("embedding_norm",), f"{prefix}input_layernorm"),
        *norm_leaves(config, ("state_norm",), f"{prefix}hidden_norm"),
        *norm_leaves(config, ("mlp_norm",), f"{prefix}post_attention_layernorm"),
        qkv_kernel(both, projections),
        stacked_kernel(("attention", "out", "kernel"), out, ("heads", "embed"), (num_numbers, width)),
    ]
    if config.attention_bias:
        leaves.append(qkv_bias(both, projections))
    if config.attention_output_bias:
        leaves.append(whole(("attention", "out", "bias"), f"{prefix}{names.out}.bias", width))
    return leaves + feed_forward(config, prefix, names)


def _ids(config: EagleConfig) -> Leaf:
    """Return the leaf with the model's ids of the tokens that the head proposes."""
    size, vocab_size = config.draft_vocab_size, config.vocab_size

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        ids = tensors[0].astype(np.int64) + np.arange(size)
        if ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) < size:
            raise InvalidArgument(IDS, f"has duplicate token ids, or ids beyond the vocabulary of {vocab_size}")
        leaf[...] = ids

    return Leaf(("ids",), (None,), (size,), ((IDS, (size,)),), pack, (0,), dtype=np.dtype(np.int32))


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """The MTP layer of a family: its name, and its tensors without `.weight`, after the number of the layer.

    Attributes:
        architecture: vLLM's name.
        name_prefix: prefix of all names; if empty, that of the model. Such norms and projections have no number.
        layers_prefix: prefix of the layer's number.
        is_after: its number follows those of the model's layers; otherwise it is 0.
        state_first: the input is the state and the embedding, concatenated in this order.
        fused: architecture of checkpoints with all experts of the layer in one tensor; empty if there are none.
    """

    architecture: str
    name_prefix: str = ""
    layers_prefix: str = "layers."
    is_after: bool = True
    token_norm: str = "enorm"
    state_norm: str = "hnorm"
    projection: str = "eh_proj"
    norm: str = "shared_head.norm"
    state_first: bool = False
    fused: str = ""


_QWEN = MtpLayer(
    "Qwen3NextMTP",
    name_prefix="mtp.",
    is_after=False,
    token_norm="pre_fc_norm_embedding",
    state_norm="pre_fc_norm_hidden",
    projection="fc",
    norm="norm",
)
_QWEN35 = dataclasses.replace(_QWEN, architecture="Qwen3_5MTP")
_QWEN35_MOE = dataclasses.replace(_QWEN, architecture="Qwen3_5MoeMTP", fused=FUSED_MTP)

MTP_LAYERS: Mapping[str, MtpLayer] = {
    "DeepseekV3ForCausalLM": MtpLayer("DeepSeekMTPModel"),
    "Glm4MoeForCausalLM": MtpLayer("Glm4MoeMTPModel"),
    "Glm4MoeLiteForCausalLM": MtpLayer("Glm4MoeLiteMTPModel"),
    "MiMoForCausalLM": MtpLayer(
        "MiMoMTPModel",
        layers_prefix="mtp_layers.",
        is_after=False,
        token_norm="token_layernorm",
        state_norm="hidden_layernorm",
        projection="input_proj",
        norm="final_layernorm",
        state_first=True,
    ),
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN35,
    "Qwen3_5ForConditionalGeneration": _QWEN35,
    "Qwen3_5MoeForCausalLM": _QWEN35_MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN35_MOE,
}
"""MTP layers by the architecture of their models."""
_ARCHITECTURES = frozenset(name for mtp in MTP_LAYERS.values() for name in (mtp.architecture, mtp.fused) if name)


def is_mtp(config: ModelConfig) -> bool:
    """Return True for the config of an MTP layer."""
    return config.architecture in _ARCHITECTURES


def mtp_config(config: ModelConfig) -> ModelConfig:
    """Return the config of the MTP layer of a model, which is like the model's last layer with attention.

    Raises:
        Unsupported: the model's family has no MTP layers, or they are not supported.
    """
    mtp = MTP_LAYERS.get(config.architecture)
    if mtp is None or not isinstance(config, DecoderConfig):
        raise Unsupported(
            f"{config.architecture} has no MTP layer that is supported; models with one: {', '.join(MTP_LAYERS)}"
        )
    return dataclasses.replace(
        config,
        architecture=mtp.architecture,
        num_layers=1,
        first_layer=config.num_layers if mtp.is_after else 0,
        kinds=tuple(kind for kind in config.layer_kinds if not kind.states)[-1:],
    )


def stored_mtp(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """Return the config of an MTP layer in a checkpoint with these tensors."""
    fused = next((mtp.fused for mtp in MTP_LAYERS.values() if mtp.architecture == config.architecture), "")
    is_fused = fused and any(name.startswith("mtp.") and name.endswith(".experts.gate_up_proj") for name in names)
    return dataclasses.replace(config, architecture=fused) if is_fused else config


def mtp_leaves(config: DecoderConfig, prefix: str, mtp: MtpLayer) -> list[Leaf]:
    """Return the leaves around an MTP layer; the embedding and the output matrix are the model's."""
    width = config.hidden_size
    prefix = mtp.name_prefix or f"{prefix}{mtp.layers_prefix}{config.first_layer}."
    return [
        *norm_leaves(config, ("token_norm",), prefix + mtp.token_norm),
        *norm_leaves(config, ("state_norm",), prefix + mtp.state_norm),
        transposed(("eh_proj", "kernel"), f"{prefix}{mtp.projection}.weight", ("heads", "embed"), (2 * width, width)),
        *norm_leaves(config, ("norm",), prefix + mtp.norm),
    ]
