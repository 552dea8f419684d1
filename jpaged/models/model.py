"""What every model is to those who run it, and which one a config means."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import numpy as np

from jpaged.errors import InternalError
from jpaged.models.config import LlamaConfig, ModelConfig, OptConfig
from jpaged.models.layers import Attend, Params
from jpaged.models.llama import Llama
from jpaged.models.opt import Opt
from jpaged.models.stack import LayerMode


class Model(Protocol):
    """A model as a description: hashable, without arrays, static under jit.

    It knows nothing of blocks, batches or sampling: tokens come packed in one axis T, and attention is injected.
    T is at least 2 in bfloat16, where a product with one row is ten times slower on CPUs than one with two.
    """

    @property
    def config(self) -> ModelConfig:
        """The shape of the model."""

    @property
    def dtype(self) -> np.dtype:
        """Type of parameters and activations, float32 or bfloat16."""

    def abstract_params(self, layer_mode: LayerMode) -> Params:
        """Shapes and types of the parameter tree."""

    def init_params(self, key: jax.Array, layer_mode: LayerMode) -> Params:
        """Random parameters: normal with a standard deviation of 0.02, norms of one, biases of zero.

        Both layer modes sample the same numbers.
        """

    def run(
        self,
        params: Params,
        token_ids_t: jax.Array,
        positions_t: jax.Array,
        rope_lens_t: jax.Array,
        attend: Attend,
        carry: Any,
        layer_mode: LayerMode,
    ) -> tuple[jax.Array, Any]:
        """Tokens to hidden states after the final norm.

        A pure function of its arrays: it can be jitted, differentiated, and mapped over a batch with vmap.

        Args:
            params: the tree of `abstract_params(layer_mode)`.
            token_ids_t: int32 `[T]`, all below vocab_size.
            positions_t: int32 `[T]`, the token's place in its sequence.
            rope_lens_t: int32 `[T]`, see `jpaged.models.rope.cos_sin`; learned positions do not depend on it.
            attend: attention. It stores k and v where the carry keeps them, scales scores by 1 / sqrt(D) itself,
                and masks; query head h reads key/value head h // (H / K).
            carry: what attend threads through the layers: the KV pool when serving, `()` when training.
            layer_mode: how the layers run; see `run_layers`.

        Returns:
            hidden states `[T, E]` in the model's type, and the carry.
        """

    def logits(self, params: Params, hidden_re: jax.Array) -> jax.Array:
        """Hidden states `[R, E]` to float32 logits `[R, V]`. Reads no parameters of layers."""


def model_for(config: ModelConfig, dtype: np.dtype) -> Model:
    """The model that a config describes.

    Raises:
        InvalidArgument: dtype is neither float32 nor bfloat16.
    """
    match config:
        case LlamaConfig():
            return Llama(config, dtype)
        case OptConfig():
            return Opt(config, dtype)
    raise InternalError(f"no model for a {type(config).__name__}")
