"""The shape of a decoder: all options of a family, frozen; and how to drop old tokens (StreamingLLM)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, Self

from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.models.config import Activation, ModelConfig
from jpaged.models.layer_kinds import HeadSizes, LayerKind
from jpaged.models.rope_config import RopeConfig

Residual = Literal["sequential", "parallel", "shared", "post"]
HeadNorms = Literal["none", "head", "rotated", "unit", "wide", "layer"]
"""Norms of queries and keys: see `DecoderConfig`."""


@dataclass(frozen=True, slots=True)
class QueryScale:
    """A factor of queries that grows with their position: 1 + beta * log(1 + floor((position + offset) / length)).

    Attributes:
        is_global: only layers without rotary embedding have it.
    """

    beta: float
    length: int
    offset: int = 0
    is_global: bool = False


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Heads of the gated delta rule; each key head has an equal number of value heads.

    Attributes:
        key_dim: of queries and keys.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise InvalidArgument(
                "linear_num_key_heads",
                f"is {self.num_key_heads}; it must divide linear_num_value_heads, {self.num_value_heads}",
            )

    @property
    def value_width(self) -> int:
        """Numbers of the values of a key head."""
        return self.num_value_heads // self.num_key_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Numbers of a key head that the convolution reads: query, key and values."""
        return 2 * self.key_dim + self.value_width

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of all channels, and the shape of the matrices of all value heads."""
        matrices = self.num_value_heads, self.key_dim, self.value_dim
        return (self.num_key_heads * self.num_channels,), matrices


@dataclass(frozen=True, slots=True)
class MambaShape:
    """Heads of Mamba-2; each group has an equal number of consecutive heads.

    Attributes:
        state_dim: numbers of the state for each of the `head_dim` channels of a head.
        has_bias: the convolution has a bias.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    has_bias: bool = True

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise InvalidArgument("num_groups", f"is {self.num_groups}; it must divide {self.num_heads} heads of Mamba")

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def group_width(self) -> int:
        """Numbers of all groups by which states are written and read."""
        return 2 * self.num_groups * self.state_dim

    def get_states(self, num_taps: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a sequence's state: windows of channels and of groups, and the matrices of all heads."""
        num_before = num_taps - 1
        return (
            (self.width * num_before,),
            (self.group_width * num_before,),
            (self.num_heads, self.state_dim, self.head_dim),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """A decoder of layers with attention and feed-forward.

    Attributes:
        kinds: of the layers; if empty, all have full attention and use the first rope, if there is one.
        ropes: rotary embeddings, referenced by kinds; empty if positions are learned.
        num_positions: rows of the learned position embedding; 0 is none.
        position_offset: rows of that embedding in the checkpoint before the row of position 0.
        num_token_types: rows of the embedding of token types; 0 is none.
        embed_norm: the sum of the embeddings is normalized.
        norm: rms, or layer, which subtracts the mean and has a bias.
        norm_eps: added to the mean square in every norm.
        norm_bias: layer norms have biases.
        norm_offset: added to the stored weights of norms.
        residual: `sequential`, y = x + attention(norm(x)), then y + feed_forward(norm(y)); `parallel`, x +
            attention(norm(x)) + feed_forward(another norm(x)); `shared`, the same with one norm; `post`, y = norm(x +
            attention(x)), then norm(y + feed_forward(y)).
        residual_scale: factor of the outputs of attention and feed-forward.
        pre_norms: inputs of attention and feed-forward are normalized.
        post_norms: outputs of attention and feed-forward are normalized before they are added, or the sums are.
        final_norm: the last layer's output is normalized.
        attention_bias: biases on query, key and value.
        qk_norm: queries and keys are normalized: `head`, an RMS norm of each head before the rotation; `rotated`, the
            same after it; `unit`, the same without weights, in layers with a rotation; `wide`, an RMS norm over all
            heads; `layer`, a layer norm of each head, with weights for each head and no biases.
        query_scale: a factor of queries by position; None is none.
        has_sinks: each query head of each layer has a sink score that takes a share of the attention weights.
        activation: in the feed-forward.
        is_gated: the feed-forward is down(act(gate(x)) * up(x)), else down(act(up(x))).
        is_interleaved: the checkpoint rotates neighboring dimensions against each other, not halves.
        embed_scale: multiplies embedded tokens, rounded to the model's type.
        scales_given_embeds: it multiplies embeddings that callers give as well, as in vLLM's model of the family.
        logit_scale: multiplies logits.
        logit_bias: logits have a bias.
        logit_cap: logits become cap * tanh(logits / cap); None leaves them.
        outgrows_keys: a sequence that grows beyond the length of pretraining has all its keys recomputed; else existing
            keys stay.
        conv_len: tokens that a short convolution reads, with the newest one (K), in recurrent layers; 0 without any.
        delta: heads of the gated delta rule in recurrent layers; None without it.
        mamba: heads of Mamba-2 in recurrent layers; None without it.
        value_norm: values are divided by their root mean square.
        values_are_keys: layers without a window have one projection, whose result is both keys and values.
        layer_inputs: numbers of each token that every layer adds by a gate, from an embedding and a projection of the
            first layer's input (Gemma 3n); 0 is none.
        layer_vocab_size: rows of that embedding; later tokens have those of token 0. 0 is the vocabulary.
        layer_scales: the output of each layer has a factor.
        num_states: hidden states of each token, of which layers predict all and compute one (AltUp, Baykal et al. 2023,
            arXiv 2301.13310).
        laurel_rank: rank of a learned residual connection (Menghani et al. 2024, arXiv 2411.07501); 0 is none.
    """

    kinds: tuple[LayerKind, ...] = ()
    ropes: tuple[RopeConfig, ...] = ()
    num_positions: int = 0
    position_offset: int = 0
    num_token_types: int = 0
    embed_norm: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float
    norm_bias: bool = True
    norm_offset: float = 0.0
    residual: Residual = "sequential"
    residual_scale: float = 1.0
    pre_norms: bool = True
    post_norms: bool = False
    final_norm: bool = True
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: HeadNorms = "none"
    query_scale: QueryScale | None = None
    has_sinks: bool = False
    activation: Activation = "silu"
    is_gated: bool = True
    is_interleaved: bool = False
    embed_scale: float = 1.0
    scales_given_embeds: bool = False
    logit_scale: float = 1.0
    logit_bias: bool = False
    logit_cap: float | None = None
    outgrows_keys: bool = False
    conv_len: int = 0
    delta: DeltaShape | None = None
    mamba: MambaShape | None = None
    value_norm: bool = False
    values_are_keys: bool = False
    layer_inputs: int = 0
    layer_vocab_size: int = 0
    layer_scales: bool = False
    num_states: int = 1
    laurel_rank: int = 0

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        for index, rope in enumerate(self.ropes):
            rope.check(self.get_rotary_dim(index))
        if self.mixture is None and any(kind.is_sparse for kind in self.kinds):
            raise InvalidArgument("mixture", "is missing, but some layers are sparse")
        object.__setattr__(self, "kinds", self._without_wide_windows())

    def _without_wide_windows(self) -> tuple[LayerKind, ...]:
        """Return the kinds, with windows removed that are as wide as the longest sequence."""

        def widened(kind: LayerKind) -> LayerKind:
            window = kind.attention.reach
            if window is None or window < self.max_model_len:
                return kind
            return dataclasses.replace(kind, attention=dataclasses.replace(kind.attention, sliding_window=None))

        kinds = tuple(map(widened, self.kinds))
        return () if set(kinds) == {self._alike} else kinds

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that ropes apply to."""
        return self.head_dim

    def get_rotary_dim(self, rope: int) -> int:
        """Return the dimensions of the heads that a rope applies to."""
        sizes = (kind.heads for kind in self.kinds if kind.rope == rope and kind.heads is not None)
        return next((size.head_dim for size in sizes), self.rotary_dim)

    def of_layer(self, kind: LayerKind) -> DecoderConfig:
        """Return the config with the heads and the width of a layer of this kind."""
        if kind.heads is None and kind.inner is None:
            return self
        heads = kind.heads or HeadSizes(self.num_kv_heads, self.head_dim)
        return dataclasses.replace(
            self,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            intermediate_size=kind.inner or self.intermediate_size,
        )

    def with_kv_heads(self, num_parts: int) -> Self:
        """See `ModelConfig`; layers with more heads than the pool take fewer places if heads are repeated."""
        num_kv_heads = max(self.num_kv_heads, num_parts)

        def repeated(kind: LayerKind) -> LayerKind:
            if kind.heads is None:
                return kind
            own = max(kind.heads.num_kv_heads, num_parts)
            heads = dataclasses.replace(kind.heads, num_kv_heads=own, num_places=own // num_kv_heads)
            return dataclasses.replace(kind, heads=heads)

        return dataclasses.replace(self, num_kv_heads=num_kv_heads, kinds=tuple(map(repeated, self.kinds)))

    @property
    def _alike(self) -> LayerKind:
        return LayerKind(AttentionKind(self.head_dim**-0.5), 0 if self.ropes else None)

    @property
    def num_recurrent_parts(self) -> int:
        """See `ModelConfig`: a key head of the delta rule, with its value heads, is on one device."""
        if self.mamba is not None:
            return math.gcd(self.mamba.num_heads, self.mamba.group_width)
        return self.hidden_size if self.delta is None else self.delta.num_key_heads

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer."""
        return self.kinds or (self._alike,) * self.num_layers

    @property
    def has_rope_axes(self) -> bool:
        """See `ModelConfig`."""
        return any(rope.sections for rope in self.ropes)

    @property
    def embed_width(self) -> int:
        """See `ModelConfig`."""
        width = self.hidden_size if self.vision is None else self.vision.row_width
        return 0 if self.layer_inputs else width

    @property
    def max_model_len(self) -> int:
        """Maximum sequence length, in tokens, that the positions support."""
        if self.num_positions or len(self.ropes) != 1:
            return self.num_positions or self.max_position_embeddings
        (rope,) = self.ropes
        if rope.kind in ("linear", "dynamic"):
            return math.floor(self.max_position_embeddings * rope.factor)
        if rope.kind == "yarn":
            return math.floor(rope.original_max_position_embeddings * rope.factor)
        return self.max_position_embeddings

    @property
    def max_prefix_len(self) -> int | None:
        """Longest prefix whose keys do not depend on later tokens; None means no limit."""
        return min((rope.max_prefix_len for rope in self.ropes if rope.max_prefix_len is not None), default=None)

    @property
    def outgrown_len(self) -> int | None:
        """The length of pretraining, if keys are recomputed beyond it; otherwise None."""
        return self.max_prefix_len if self.outgrows_keys else None

    @property
    def fuses_gate(self) -> bool:
        """True if a matmul kernel may apply the gate: one of `matmul.multiply.GATES`."""
        return self.activation in ("silu", "gelu_tanh", "gelu")


WINDOW = "lossy_kv_window"


def apply_lossy_window(config: ModelConfig, options: EngineConfig) -> ModelConfig:
    """Return the config to serve: as published, or with the window and the sink tokens that the options request.

    Tokens keep their positions in the text. So the distance between a query and the first tokens grows with the text,
    as in the original model, and a text is limited to the model's positions.

    Raises:
        InvalidArgument: the window hides nothing, or layers have windows already.
        Unsupported: the model's layers have no configurable attention kinds.
    """
    window, num_sinks = options.lossy.lossy_kv_window, options.lossy.num_sinks
    if window is None:
        return config
    if not isinstance(config, DecoderConfig):
        raise Unsupported(f"{WINDOW}: {config.architecture} does not support other kinds of attention")
    max_model_len = min(options.model.max_model_len or config.max_model_len, config.max_model_len)
    if window + num_sinks >= max_model_len:
        raise InvalidArgument(
            WINDOW,
            f"{window} tokens and the first {num_sinks} (lossy_kv_sinks) cover a whole sequence of max_model_len "
            f"({max_model_len}): remove the option",
        )
    widths = {kind.sliding_window for kind in config.attention_kinds}
    own = sorted(width for width in widths if width is not None and width < max_model_len)
    if own:
        told = ", ".join(map(str, own))
        raise InvalidArgument(
            WINDOW, f"{window}: {config.architecture} has layers with their own windows of {told} tokens"
        )

    def narrowed(kind: AttentionKind) -> AttentionKind:
        return dataclasses.replace(kind, sliding_window=window, num_sink_tokens=num_sinks)

    kinds: tuple[LayerKind, ...] = tuple(
        dataclasses.replace(kind, attention=narrowed(kind.attention)) for kind in config.layer_kinds
    )
    return dataclasses.replace(config, kinds=kinds)


def describe_lossy_cache(options: EngineConfig) -> list[str]:
    """Return a line that reports the lossy cache at startup; empty if it is off."""
    window, num_sinks = options.lossy.lossy_kv_window, options.lossy.num_sinks
    if window is None:
        return []
    return [
        f"LOSSY: tokens attend only to the first {num_sinks} and the last {window} tokens; answers differ from the "
        "model's"
    ]
