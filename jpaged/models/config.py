"""The shape of a model, its experts and its quantization: frozen, hashable values, static under jit.

Quantization is rules over the names of modules in a checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Literal, Self

from jpaged.errors import InvalidArgument
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.kernels.mixture_kind import SILU, GateFunction, Routing
from jpaged.models.layer_kinds import LayerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A router, experts, and optionally an expert that all rows share, in place of a feed-forward.

    Attributes:
        routing: how rows choose experts.
        width: of one expert, F.
        gate: the gate function of gates and ups; the shared expert has gates if the others do.
        has_biases: gates, ups and downs of experts have biases.
        router_bias: the router's logits have a bias.
        choice_bias: the choice of experts, but not their weights, has a bias per expert (DeepSeek-V3).
        shared_width: of the shared expert; 0 is none.
        shared_is_weighed: the shared expert is multiplied by the sigmoid of a linear layer (Qwen2-MoE).
        weighs_inputs: the weight of the only expert of a row multiplies its input, not its output (Llama 4).
        is_beside: layers with experts have a dense feed-forward, too, and the router has its own norm (Gemma 4).
        is_parallel: each device has some whole experts; otherwise a part of each. It does not come from config.json.
        shared_is_whole: each device has the whole shared expert; otherwise a part. It does not come from config.json.
        num_redundant_experts: physical experts beyond the model's own, if experts are balanced over the devices; None
            if they are not. Leaves of the model have its own experts only. It does not come from config.json.
    """

    routing: Routing
    width: int
    gate: GateFunction = SILU
    has_biases: bool = False
    router_bias: bool = False
    choice_bias: bool = False
    shared_width: int = 0
    shared_is_weighed: bool = False
    weighs_inputs: bool = False
    is_beside: bool = False
    is_parallel: bool = False
    shared_is_whole: bool = False
    num_redundant_experts: int | None = None

    @property
    def num_physical_experts(self) -> int:
        """Experts whose matrices are stored, including replicas."""
        return self.routing.num_experts + (self.num_redundant_experts or 0)

    def divides(self, num_parts: int) -> bool:
        """Return True if the matrices can be split into this many equal parts."""
        parted = self.routing.num_experts if self.is_parallel else self.width
        return parted % num_parts == 0 and (self.shared_is_whole or self.shared_width % num_parts == 0)

    def __str__(self) -> str:
        """Return a description of the split dimensions."""
        shared = f" and a shared width of {self.shared_width}" if self.shared_width else ""
        if self.is_parallel:
            return f"{self.routing.num_experts} experts{shared}"
        return f"an expert's width of {self.width}{shared}"


_PREFIXES = (
    ("transformer.h.", "h."),
    ("model.decoder.", "decoder."),
    ("model.language_model.", "language_model.model."),
    ("model.layers.", "layers."),
)
"""Pairs of equivalent prefixes of module names: those of quantization libraries, and those of other checkpoints."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantization of the matrices of a model; hashable, a part of the model's config.

    Attributes:
        method: the method's name in the checkpoint, or the requested one if the model is quantized at load time.
        rules: regular expressions and formats; the first one found in a module's name applies. None is unquantized.
        has_output: the rules apply to the output matrix too, which is otherwise unquantized.
        has_embedding: the rules apply to the embedding of tokens too; a tied one is also the output matrix.
        num_parts: parts that the model is split into; groups do not cross their boundaries.
    """

    method: str
    rules: tuple[tuple[str, MatrixFormat | None], ...]
    has_output: bool = False
    has_embedding: bool = False
    num_parts: int = 1

    def split(self, num_parts: int) -> Quantization:
        """Return the quantization of the model in `num_parts` parts."""
        return dataclasses.replace(self, num_parts=num_parts)

    def get_format(self, module: str) -> MatrixFormat | None:
        """Return the format of a module's matrix as published, by its name (`model.layers.0.mlp.up_proj`), or None."""
        place = self.get_rule(module)
        return None if place is None else self.rules[place][1]

    def get_rule(self, module: str) -> int | None:
        """Return the index of the rule that applies to a module, under any equivalent name; None if none does."""
        return _find_rule(tuple(pattern for pattern, _ in self.rules), module)


@functools.lru_cache(maxsize=1 << 14)  # a start looks up each of hundreds of names ten times
def _find_rule(patterns: tuple[str, ...], module: str) -> int | None:
    names = _get_names(module)
    return next(
        (place for place, pattern in enumerate(patterns) if any(re.search(pattern, name) for name in names)), None
    )


def _get_names(module: str) -> list[str]:
    others = [
        prefix + module.removeprefix(own)
        for pair in _PREFIXES
        for own, prefix in (pair, pair[::-1])
        if module.startswith(own)
    ]
    return [module, *others]


MAX_LAYERS = 2**12
MAX_WIDTH = 2**20
"""Limit of hidden state, feed-forward and heads: far above any model's, and small enough to allocate."""
MAX_VOCAB_SIZE = 2**24

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
"""gelu is the exact one, by the error function; gelu_tanh is its usual approximation; relu2 is the square of relu.

xielu has two parameters per layer, and only feed-forwards without a gate have it.
"""


MAX_PATCHES = 2**16
"""Limit of an image's patches, which attend to each other: that of Qwen2.5-VL's published image processors."""
VisionKind = Literal["pixtral", "qwen2_5_vl", "qwen3_vl", "siglip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Shape of a model's vision encoder, and of the projector after it.

    Attributes:
        kind: the family of encoders.
        hidden_size: width of the encoder.
        intermediate_size: its feed-forward width.
        patch_size: pixels of a patch, in rows and in columns.
        temporal_size: frames of a patch: an image is repeated.
        image_size: pixels of the longest edge, or of both edges; 0 if the image processor decides.
        merge_size: patches of an output row, in rows and in columns.
        out_size: width of the language model.
        rope_theta: base of rotary positions in two dimensions; 0 for learned positions.
        window_size: pixels of a window, of both edges; 0 without windows.
        full_layers: layers without windows, if others have them.
        num_places: learned positions in rows and in columns, which are interpolated for each image; 0 without.
        deep_layers: layers whose outputs are projected, too, and added to the outputs of the language model's first
            layers (DeepStack, Meng et al. 2024).
        image_token_id: token whose places in a prompt take the encoder's output.
        begin_token_id, end_token_id: tokens around an image; None if there are none.
    """

    kind: VisionKind
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    image_size: int
    merge_size: int
    out_size: int
    activation: Activation
    norm_eps: float
    image_token_id: int
    projector_activation: Activation = "gelu"
    projector_eps: float = 0.0
    projector_bias: bool = False
    num_channels: int = 3
    temporal_size: int = 1
    rope_theta: float = 0.0
    window_size: int = 0
    full_layers: tuple[int, ...] = ()
    num_places: int = 0
    deep_layers: tuple[int, ...] = ()
    begin_token_id: int | None = None
    end_token_id: int | None = None

    @property
    def patch_dim(self) -> int:
        """Numbers of a patch."""
        return self.num_channels * self.temporal_size * self.patch_size**2

    @property
    def is_bidirectional(self) -> bool:
        """True if the tokens of an image see each other in the language model, also later ones."""
        return self.kind == "siglip"

    @property
    def num_tokens(self) -> int:
        """Output rows of an image of `image_size`."""
        return self.max_patches // self.num_merged

    @property
    def num_whole_tokens(self) -> int:
        """Tokens of an image that a step computes together; 0 if a step may have a part of them."""
        return self.num_tokens if self.is_bidirectional else 0

    @property
    def row_width(self) -> int:
        """Numbers of an output row: an input embedding, and what the language model's first layers add."""
        return self.out_size * (1 + len(self.deep_layers))

    @property
    def num_merged(self) -> int:
        """Patches of an output row."""
        return self.merge_size**2

    @property
    def window_edge(self) -> int:
        """Patches of a window, in rows and in columns; 0 without windows."""
        return self.window_size // self.merge_size // self.patch_size * self.merge_size

    @property
    def max_patches(self) -> int:
        """Maximum number of patches of an image, unless the image processor has another limit."""
        if not self.image_size:
            return MAX_PATCHES
        edge = -(-self.image_size // (self.patch_size * self.merge_size)) * self.merge_size
        return min(edge**2, MAX_PATCHES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Fields of every model that memory, sampling and attention need. Each family subclasses it.

    Equal configs share compiled programs.

    Attributes:
        architecture: the class name in config.json `architectures`.
        vocab_size: rows of the embedding, V.
        hidden_size: model width, E.
        intermediate_size: feed-forward width, F.
        num_layers: L.
        first_layer: number of the first layer in the names of tensors; above 0 for a head after the model's layers. It
            does not come from config.json.
        num_heads: query heads, H.
        num_kv_heads: key and value heads, K; divides H.
        head_dim: D, even.
        max_position_embeddings: length in the checkpoint; `max_model_len` is derived from it.
        tie_word_embeddings: the embedding is also the output matrix.
        eos_token_ids: tokens that end a sequence; may be empty. Ids beyond the vocabulary, which some checkpoints
            inherit as defaults, are removed.
        bos_token_id: token that begins a prompt; None if the checkpoint has none within the vocabulary.
        checkpoint_dtype: dtype of the weights in the checkpoint's config: float32, bfloat16 or float16.
        quantization: which matrices are quantized, and how; None has none.
        widened_method: quantization of the files whose matrices become weights when they are read; None for none.
        mixture: the experts of sparse layers; None if there are none.
        vision: the vision encoder; None for a model of text, or one whose encoder is not supported.
        has_dp_attention: each device runs the attention of some sequences, with all heads; otherwise for some heads. It
            does not come from config.json.
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
    quantization: Quantization | None = None
    widened_method: str | None = None
    mixture: Mixture | None = None
    vision: VisionConfig | None = None
    has_dp_attention: bool = False
    first_layer: int = 0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise InvalidArgument(
                "num_kv_heads", f"is {self.num_kv_heads}; it must divide num_heads, {self.num_heads}, evenly"
            )
        if self.head_dim % 2:
            raise InvalidArgument("head_dim", f"is {self.head_dim}; it must be an even number")
        ends = tuple(token_id for token_id in self.eos_token_ids if token_id < self.vocab_size)
        object.__setattr__(self, "eos_token_ids", ends)
        if self.bos_token_id is not None and self.bos_token_id >= self.vocab_size:
            object.__setattr__(self, "bos_token_id", None)

    @property
    def max_model_len(self) -> int:
        """Maximum sequence length of the model, in tokens."""
        return self.max_position_embeddings

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer."""
        return (LayerKind(AttentionKind(self.head_dim**-0.5)),) * self.num_layers

    @property
    def num_recurrent_layers(self) -> int:
        """Layers that keep a state for each sequence, in place of keys and values."""
        return sum(bool(kind.states) for kind in self.layer_kinds)

    @property
    def num_recurrent_parts(self) -> int:
        """Largest number of equal parts of a recurrent layer; a number of devices must divide it."""
        return self.hidden_size

    @property
    def is_encoder(self) -> bool:
        """True if tokens see later ones: the model embeds and classifies prompts, and generates nothing."""
        return not all(kind.attention.is_causal for kind in self.layer_kinds)

    @property
    def has_rope_axes(self) -> bool:
        """True if rotary embedding has positions of time, row and column, which differ in images."""
        return False

    @property
    def embed_width(self) -> int:
        """Width of input embeddings that may replace tokens; 0 if layers need the tokens themselves."""
        return self.hidden_size

    @property
    def num_attention_layers(self) -> int:
        """Layers of the KV pool; the layers of an encoder take turns in one.

        A pool without layers has one that no layer reads: its blocks still count tokens and name prefixes.
        """
        return 1 if self.is_encoder else max(1, sum(kind.num_places for kind in self.layer_kinds))

    def with_kv_heads(self, num_parts: int) -> Self:
        """Return the config with at least one key/value head for each of `num_parts` devices, by repeating heads."""
        return dataclasses.replace(self, num_kv_heads=max(self.num_kv_heads, num_parts))

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """Attention kind of each layer."""
        return tuple(kind.attention for kind in self.layer_kinds)

    @property
    def value_dim(self) -> int | None:
        """Length of the prefix of keys that serves as values; None if values are projected separately."""
        return None

    @property
    def kv_width(self) -> int:
        """Numbers that a token stores in a layer."""
        return (2 if self.value_dim is None else 1) * self.num_kv_heads * self.head_dim

    @property
    def query_width(self) -> int:
        """Mean of the numbers that a query multiplies with a key, and those of the sum of values, in all heads."""
        value_dim = self.head_dim if self.value_dim is None else self.value_dim
        return self.num_heads * (self.head_dim + value_dim) // 2

    @property
    def fuses_gate(self) -> bool:
        """True if a matmul kernel may apply the gate."""
        return True

    @property
    def max_prefix_len(self) -> int | None:
        """Longest prefix whose keys do not depend on later tokens; None means no limit."""
        return None

    @property
    def outgrown_len(self) -> int | None:
        """Length beyond which all keys of a sequence are recomputed; None means never."""
        return None
