"""The one way through a stack of layers: rolled up in a scan, or unrolled over a layer that is traced once a kind."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jpaged.kernels.attention_kind import AttentionKind

LayerMode = Literal["scan", "loop"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Which layer of the stack it is.

    Attributes:
        index: int32 scalar.
        attention: its kind; static.
    """

    index: jax.Array
    attention: AttentionKind = dataclasses.field(metadata={"static": True})


# One layer: (its parameters, x, carry, its place) -> (x, carry); x is hidden states, or a tree with them.
Layer = Callable[[Any, Any, Any, LayerPlace], tuple[Any, Any]]


def run_layers(
    layer: Layer, layer_params: Any, x: Any, carry: Any, kinds: Sequence[AttentionKind], *, mode: LayerMode
) -> tuple[Any, Any]:
    """Runs x and the carry through every layer in order.

    The carry (the whole KV pool when serving) stays one donated value in both modes: it is never sliced by layer.

    Args:
        layer: one layer; may close over values of the surrounding trace.
        layer_params: `scan`: one tree whose leaves are stacked on axis 0; `loop`: a list with one tree a layer.
        carry: any tree; its shapes must not change.
        kinds: of attention, one a layer.
        mode: `scan` compiles one layer whatever the depth, but XLA copies each slice of the weights on CPU and GPU
            (2 to 3 times the traffic, measured), and layers of several kinds are unrolled all the same; `loop` gives
            every layer its own arrays, and the jitted layer is traced and lowered once for each kind.
    """
    if mode == "scan" and len(set(kinds)) == 1:
        # The layer's number is counted: read off an array it is an operation of its own.
        def body(state: tuple[Any, Any, jax.Array], params: Any) -> tuple[tuple[Any, Any, jax.Array], None]:
            x, carry, layer_index = state
            return (*layer(params, x, carry, LayerPlace(layer_index, kinds[0])), layer_index + 1), None

        (x, carry, _), _ = jax.lax.scan(body, (x, carry, jnp.int32(0)), layer_params)
        return x, carry
    if mode == "scan":
        layer_params = [jax.tree.map(operator.itemgetter(index), layer_params) for index in range(len(kinds))]
    jitted = jax.jit(layer)
    for layer_index, (params, kind) in enumerate(zip(layer_params, kinds, strict=True)):
        x, carry = jitted(params, x, carry, LayerPlace(jnp.int32(layer_index), kind))
    return x, carry
