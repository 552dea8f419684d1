"""The one way through a stack of layers: rolled up in a scan, or unrolled over a layer that is traced once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

LayerMode = Literal["scan", "loop"]

# One layer: (its parameters, x, carry, layer index as an int32 scalar) -> (x, carry).
Layer = Callable[[Any, jax.Array, Any, jax.Array], tuple[jax.Array, Any]]


def run_layers(layer: Layer, layer_params: Any, x: jax.Array, carry: Any, *, mode: LayerMode) -> tuple[jax.Array, Any]:
    """Runs x and the carry through every layer in order.

    The carry (the whole KV pool when serving) stays one donated value in both modes: it is never sliced by layer.

    Args:
        layer: one layer; may close over values of the surrounding trace.
        layer_params: `scan`: one tree whose leaves are stacked on axis 0; `loop`: a list with one tree a layer.
        x: the hidden states.
        carry: any tree; its shapes must not change.
        mode: `scan` compiles one layer whatever the depth, but XLA copies each slice of the weights on CPU and GPU
            (2 to 3 times the traffic, measured); `loop` gives every layer its own arrays, and the jitted layer is
            traced and lowered once.
    """
    if mode == "scan":

        def body(state: tuple[jax.Array, Any], step: tuple[Any, jax.Array]) -> tuple[tuple[jax.Array, Any], None]:
            params, layer_index = step
            return layer(params, *state, layer_index), None

        num_layers = jax.tree.leaves(layer_params)[0].shape[0]
        state, _ = jax.lax.scan(body, (x, carry), (layer_params, jnp.arange(num_layers, dtype=jnp.int32)))
        return state
    jitted = jax.jit(layer)
    for layer_index, params in enumerate(layer_params):
        x, carry = jitted(params, x, carry, jnp.int32(layer_index))
    return x, carry
