"""The loop over a stack of layers: as scans, or unrolled over a layer that is traced once per kind.

A scan ends each layer before the next one begins. `run_pipelined` moves the border between two layers to the attention,
so that a layer's last sum over the devices and the next layer's projection are in one turn of the loop:

    scan         | project, attend, feed forward + sum | project, attend, feed forward + sum | ...
    pipelined    project | attend, feed forward + sum, project | attend, feed forward + sum, project | ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.experts import StackedExperts
from jpaged.kernels.matmul.quantized import QuantizedMatrix, StackedMatrix
from jpaged.models.layer_kinds import KVPlace, LayerKind, LayerSegment, build_segments

LayerMode = Literal["scan", "loop"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The place of a layer in the stack.

    Attributes:
        index: int32 scalar: the layer's index in the pool, within its group.
        kind: static.
        group: the KV group whose block tables locate its blocks; static.
    """

    index: jax.Array
    kind: LayerKind = dataclasses.field(metadata={"static": True})
    group: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def attention(self) -> AttentionKind:
        """Attention kind of the layer."""
        return self.kind.attention


# One layer: (its parameters, x, carry, its place) -> (x, carry); x is hidden states, or a tree with them.
Layer = Callable[[Any, Any, Any, LayerPlace], tuple[Any, Any]]


def run_layers(
    layer: Layer,
    layer_params: Any,
    x: Any,
    carry: Any,
    kinds: tuple[LayerKind, ...],
    kv_places: Sequence[KVPlace],
    *,
    mode: LayerMode,
    watched: Sequence[int] = (),
) -> tuple[Any, Any, list[Any]]:
    """Run x and the carry through every layer in order.

    The carry (the whole KV pool when serving) stays one donated value in both modes: it is never sliced by layer.

    Args:
        layer: one layer; may close over values of the surrounding trace.
        layer_params: `scan`: a tree for each stack, by its name, with leaves stacked on axis 0; `loop`: a list with one
            tree per layer.
        carry: any tree; its shapes must not change.
        kinds: one per layer.
        kv_places: one per layer; those of a stack are in one group, at equal distances.
        mode: `scan` compiles one layer for each stack whatever the depth, but XLA copies each slice of the weights on
            CPU and GPU (2 to 3 times the traffic, measured); `loop` gives every layer its own arrays, and the jitted
            layer is traced and lowered once for each kind and group.
        watched: layers whose input is also returned; the number of layers stands for the last one's output.

    Returns:
        x, the carry, and the input of each of the watched layers.
    """
    seen: dict[int, Any] = {}
    if mode == "scan":
        for segment in build_segments(kinds):
            inside = [number for number in watched if segment.first <= number < segment.end]
            x, carry, found = _scan(layer, layer_params, x, carry, segment, kv_places, inside)
            seen |= dict(zip(inside, found, strict=True))
    else:
        jitted = jax.jit(layer)
        places = zip(layer_params, kinds, kv_places, strict=True)
        for number, (params, kind, (group, index)) in enumerate(places):
            seen[number] = x
            x, carry = jitted(params, x, carry, LayerPlace(jnp.int32(index), kind, group))
    seen[len(kinds)] = x
    return x, carry, [seen[number] for number in watched]


def _scan(
    layer: Layer,
    layer_params: Any,
    x: Any,
    carry: Any,
    segment: LayerSegment,
    kv_places: Sequence[KVPlace],
    watched: Sequence[int],
) -> tuple[Any, Any, list[Any]]:
    places = [[kv_places[index] for index in segment.layers_at(i)] for i in range(len(segment.kinds))]

    stacks = [layer_params[segment.stack_at(i)] for i in range(len(segment.kinds))]

    # The layer index is counted: reading it from an array would be a separate operation.
    def body(state: tuple[Any, Any, list[jax.Array], list[Any]], params: Any) -> tuple[Any, None]:
        x, carry, (repeat, *indices), seen = state
        for i, kind in enumerate(segment.kinds):
            seen = [
                _kept(found, x, repeat, segment.layers_at(i), number)
                for found, number in zip(seen, watched, strict=True)
            ]
            place = LayerPlace(indices[i], kind, places[i][0][0])
            x, carry = layer(_with_whole(params[i], stacks[i], repeat), x, carry, place)
        return (x, carry, [repeat + 1, *(i + _step(of) for i, of in zip(indices, places, strict=True))], seen), None

    counted = [jnp.int32(0), *(jnp.int32(of_stack[0][1]) for of_stack in places)]
    state = x, carry, counted, [x for _ in watched]
    (x, carry, _, seen), _ = jax.lax.scan(body, state, [_without_whole(stack) for stack in stacks])
    return x, carry, seen


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StackedArray:
    """The matrix of one layer, `[*shape]`, in the stack of all layers' matrices, `[L, *shape]`.

    Each part of it is a slice of the stack, which XLA reads in place. A part of a slice would be copied first.
    """

    stack: jax.Array
    index: jax.Array

    @property
    def dtype(self) -> Any:
        """Type of the numbers."""
        return self.stack.dtype

    def part(self, axis: int, part: int, num_parts: int) -> jax.Array:
        """Return one of the equal parts of the matrix along an axis."""
        shape = [1, *self.stack.shape[1:]]
        shape[axis + 1] //= num_parts
        begins: list[jax.Array | int] = [self.index, *([0] * (len(shape) - 1))]
        begins[axis + 1] = part * shape[axis + 1]
        return jax.lax.dynamic_slice(self.stack, begins, shape)[0]


class LayerHalves(Protocol):
    """A layer whose projection and remainder are run separately."""

    def project(self, layer_params: Any, x: Any, kind: LayerKind) -> Any:
        """Return the matmul before attention."""

    def finish(self, layer_params: Any, x: Any, projected: Any, carry: Any, place: LayerPlace) -> tuple[Any, Any]:
        """Run attention and everything after it; return x for the next layer, and the carry."""


def can_pipeline(kinds: tuple[LayerKind, ...]) -> bool:
    """Return True if all layers are in one stack."""
    segments = build_segments(kinds)
    return len(segments) == 1 and len(segments[0].kinds) == 1


def run_pipelined(
    layer: LayerHalves,
    layer_params: Any,
    x: Any,
    carry: Any,
    kinds: tuple[LayerKind, ...],
    kv_places: Sequence[KVPlace],
    *,
    watched: Sequence[int] = (),
) -> tuple[Any, Any, list[Any]]:
    """Run as `run_layers` in `scan` mode, but with each layer's projection in the previous layer's turn.

    Matrices are passed as `StackedArray`. The last turn projects for the last layer again, and drops the result.

    Args:
        kinds: of one stack; see `can_pipeline`.
    """
    (segment,) = build_segments(kinds)
    stack = layer_params[segment.stack_at(0)]
    (group, first), step = kv_places[0], _step(list(kv_places))

    def place(index: jax.Array) -> LayerPlace:
        return LayerPlace(first + step * index, kinds[0], group)

    def turn(state: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], None]:
        x, projected, carry, index, seen = state
        seen = [_kept(found, x, index, range(len(kinds)), number) for found, number in zip(seen, inside, strict=True)]
        x, carry = layer.finish(_at(stack, index), x, projected, carry, place(index))
        following = jnp.minimum(index + 1, len(kinds) - 1)
        return (x, layer.project(_at(stack, following), x, kinds[0]), carry, index + 1, seen), None

    inside = [number for number in watched if number < len(kinds)]
    begin = jnp.int32(0)
    state = x, layer.project(_at(stack, begin), x, kinds[0]), carry, begin, [x for _ in inside]
    (x, _, carry, _, seen), _ = jax.lax.scan(turn, state, None, length=len(kinds))
    found = dict(zip(inside, seen, strict=True)) | {len(kinds): x}
    return x, carry, [found[number] for number in watched]


def _at(stack: Any, index: jax.Array) -> Any:
    """Return the parameters of one layer: matrices as parts of their stacks, and others sliced."""

    def sliced(path: tuple[Any, ...], leaf: jax.Array) -> Any:
        is_matrix = getattr(path[-1], "key", None) == "kernel"
        return StackedArray(leaf, index) if is_matrix else jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)

    return jax.tree_util.tree_map_with_path(sliced, stack)


def _kept(found: Any, x: Any, repeat: jax.Array, layers: range, number: int) -> Any:
    """Return x if this repeat is the layer with that number, otherwise the value found before."""
    if number not in layers:
        return found
    is_it = repeat == layers.index(number)
    return jax.tree.map(lambda old, new: jnp.where(is_it, new, old), found, x)


def _is_of_experts(path: tuple[Any, ...]) -> bool:
    if path and getattr(path[-1], "name", None) == "base":  # of a matrix with adapters
        path = path[:-1]
    keys = [getattr(entry, "key", None) for entry in path]
    return "experts" in keys and keys[-1] == "kernel"


def _is_leaf(tree: Any) -> bool:
    return tree is None or isinstance(tree, QuantizedMatrix)


def _stays_whole(path: tuple[Any, ...], leaf: Any) -> bool:
    """Return True if a layer reads its slice of a stack in place: see `StackedExperts` and `StackedMatrix`."""
    return _is_of_experts(path) or (isinstance(leaf, QuantizedMatrix) and leaf.num_groups > 1)


def _without_whole(stack: Any) -> Any:
    """Return the parameters of a stack that a scan may slice."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: None if _stays_whole(path, leaf) else leaf, stack, is_leaf=_is_leaf
    )


def _with_whole(sliced: Any, stack: Any, repeat: jax.Array) -> Any:
    """Return a layer's parameters, with unsliced stacks in their places."""

    def placed(path: tuple[Any, ...], own: Any, whole: Any) -> Any:
        if not _stays_whole(path, whole):
            return own
        return StackedExperts(whole, repeat) if _is_of_experts(path) else StackedMatrix(whole, repeat)

    return jax.tree_util.tree_map_with_path(placed, sliced, stack, is_leaf=_is_leaf)


def _step(of_stack: list[KVPlace]) -> int:
    """Return the distance between the layers of a stack in their group."""
    return of_stack[1][1] - of_stack[0][1] if len(of_stack) > 1 else 1
