"""The shape of a model: frozen, hashable values, static under jit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jpaged.errors import InvalidArgument
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.models.experts.mixture import Mixture
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.quantisation.rules import Quantisation

MAX_LAYERS = 2**12
MAX_WIDTH = 2**20
"""Limit of hidden state, feed-forward and heads: far above any model's, and small enough to allocate."""
MAX_VOCAB_SIZE = 2**24

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
"""gelu is the exact one, by the error function; gelu_tanh is its usual approximation."""


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
        num_heads: query heads, H.
        num_kv_heads: key and value heads, K; divides H.
        head_dim: D, even.
        max_position_embeddings: length in the checkpoint; `max_model_len` is derived from it.
        tie_word_embeddings: the embedding is also the output matrix.
        eos_token_ids: tokens that end a sequence; may be empty. Ids beyond the vocabulary, which some checkpoints
            inherit as defaults, are removed.
        bos_token_id: token that begins a prompt; None if the checkpoint has none within the vocabulary.
        checkpoint_dtype: dtype of the weights in the checkpoint's config: float32, bfloat16 or float16.
        quantisation: which matrices are quantized, and how; None has none.
        mixture: the experts of sparse layers; None if there are none.
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
    quantisation: Quantisation | None = None
    mixture: Mixture | None = None

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
        """True if a matmul kernel may apply the gate; kernels support only silu."""
        return True

    @property
    def max_prefix_len(self) -> int | None:
        """Longest prefix whose keys do not depend on later tokens; None means no limit."""
        return None

    @property
    def outgrown_len(self) -> int | None:
        """Length beyond which all keys of a sequence are recomputed; None means never."""
        return None
