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
"""The limit of hidden state, feed-forward and heads: far above any model's, and little enough to be allocated."""
MAX_VOCAB_SIZE = 2**24

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
"""gelu is the exact one, by the error function; gelu_tanh its usual approximation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What every model has: what memory, sampling and attention need. A family's own shape is its subclass.

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
        max_position_embeddings: length named by the checkpoint; `max_model_len` is what the model makes of it.
        tie_word_embeddings: the embedding is also the output matrix.
        eos_token_ids: tokens that end a sequence; may be empty. One beyond the vocabulary is never sampled: it is left
            out, as checkpoints that took their class's default have it.
        bos_token_id: token that begins a prompt, if the checkpoint names one that there is.
        checkpoint_dtype: what the checkpoint says its weights are: float32, bfloat16 or float16.
        quantisation: which matrices have fewer bits, and how; None has none.
        mixture: the experts of layers that are sparse; None where none is.
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
                "num_kv_heads", f"is {self.num_kv_heads}; it must divide num_heads, {self.num_heads}, without rest"
            )
        if self.head_dim % 2:
            raise InvalidArgument("head_dim", f"is {self.head_dim}; it must be an even number")
        ends = tuple(token_id for token_id in self.eos_token_ids if token_id < self.vocab_size)
        object.__setattr__(self, "eos_token_ids", ends)
        if self.bos_token_id is not None and self.bos_token_id >= self.vocab_size:
            object.__setattr__(self, "bos_token_id", None)

    @property
    def max_model_len(self) -> int:
        """Longest sequence, in tokens, that the model is meant for."""
        return self.max_position_embeddings

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """What each layer is."""
        return (LayerKind(AttentionKind(self.head_dim**-0.5)),) * self.num_layers

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """What attention computes in each layer."""
        return tuple(kind.attention for kind in self.layer_kinds)

    @property
    def value_dim(self) -> int | None:
        """Numbers that keys begin with and that are the values; None where values are projected beside keys."""
        return None

    @property
    def kv_width(self) -> int:
        """Numbers that a token keeps in a layer."""
        return (2 if self.value_dim is None else 1) * self.num_kv_heads * self.head_dim

    @property
    def query_width(self) -> int:
        """Numbers that a token's scores with a key, and the sum of values, are products of: the mean of the two."""
        value_dim = self.head_dim if self.value_dim is None else self.value_dim
        return self.num_heads * (self.head_dim + value_dim) // 2

    @property
    def fuses_gate(self) -> bool:
        """Whether a product kernel may gate as it multiplies: it knows silu alone."""
        return True

    @property
    def max_prefix_len(self) -> int | None:
        """Tokens up to which the keys of a prefix do not depend on what follows; None is without a limit."""
        return None

    @property
    def outgrown_len(self) -> int | None:
        """Tokens beyond which all keys of a sequence are computed again; None is never."""
        return None
