"""LoRA adapter slots: the adapter matrices next to each parameter matrix, and the program that fills a slot.

    load_adapter    (matrices of all slots, slot, one adapter) -> matrices      donated: writes only the slot

A slot is zeros until it is filled. On a single CPU device, a slot that no row uses costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jpaged.device.mesh import partition_spec
from jpaged.kernels.lora import AdaptedMatrix, EmbeddingAdapters
from jpaged.models.config import ModelConfig
from jpaged.models.layers import Params
from jpaged.models.lora import INPUT_PATH, AdaptedPlace, HostAdapter, adapted_places, get_output_path
from jpaged.models.model import LeafPath, Model
from jpaged.models.stack import LayerMode

Matrices = tuple[Any, tuple[Any, ...], tuple[Any, ...]]
"""A, B of each part, and the vectors of each part if there is room for them: of all slots, or of one adapter."""


_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """Adapter capacity of a device. Static under jit.

    Attributes:
        num_slots: number of adapter slots of each matrix.
        max_rank: maximum rank of an adapter.
        has_vectors: slots have vectors for DoRA and biases.
        has_output: the output matrix has slots. Hidden states then carry their row's slot in one more column.
        has_input: the embedding of ids has slots.
        has_experts: experts and routers have slots.
    """

    num_slots: int
    max_rank: int
    has_vectors: bool = False
    has_output: bool = False
    has_input: bool = False
    has_experts: bool = False

    def shapes(self, model: Model, layer_mode: LayerMode, mesh: Mesh, *, has_slots: bool) -> dict[LeafPath, Matrices]:
        """Return the shapes of the matrices of all slots, or of one adapter, by their paths in the parameters.

        The leading axes are layers (if layers are stacked), then slots (if `has_slots`).

        Args:
            model: padded for the mesh.
            has_slots: shapes of all slots; otherwise of one adapter.
        """
        found = {}
        for place in self._places(model, layer_mode):
            lead = ((len(place.leaves),) if place.is_stacked else ()) + ((self.num_slots,) if has_slots else ())
            lead_axes = (("layers",) if place.is_stacked else ()) + ((None,) if has_slots else ())
            a_axes, b_axes = place.axes()
            a_shape, b_shapes = place.shapes(self.max_rank)

            def struct(
                shape: tuple[int, ...],
                axes: Any,
                lead: tuple[int, ...] = lead,
                lead_axes: tuple[str | None, ...] = lead_axes,
                dtype: np.dtype = model.dtype,
            ) -> jax.ShapeDtypeStruct:
                sharding = NamedSharding(mesh, partition_spec(*lead_axes, *axes))
                return jax.ShapeDtypeStruct((*lead, *shape), dtype, sharding=sharding)

            vectors = place.vector_shapes() if self.has_vectors else ()
            found[place.path] = (
                struct(a_shape, a_axes),
                tuple(struct(shape, b_axes) for shape in b_shapes),
                tuple(struct(shape, b_axes, dtype=_FLOAT32) for shape in vectors),
            )
        return found

    def add_to(self, params: Params, model: Model, layer_mode: LayerMode, mesh: Mesh) -> Params:
        """Return the parameters with empty slots next to their matrices; shapes if the parameters are shapes."""
        shapes = self.shapes(model, layer_mode, mesh, has_slots=True)
        matrices: dict[LeafPath, Matrices] = shapes
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            matrices = _zeros(shapes)
        groups = {place.path: place.num_groups for place in self._places(model, layer_mode)}
        adapted: dict[LeafPath, Any] = {
            path: AdaptedMatrix(_at(params, path), a, b, groups[path], vectors)
            for path, (a, b, vectors) in matrices.items()
            if path != INPUT_PATH
        }
        params = _replaced(params, adapted)
        if self.has_input:
            name, key = INPUT_PATH
            params[name] = {**params[name], key: EmbeddingAdapters(*matrices[INPUT_PATH])}
        return params

    def _places(self, model: Model, layer_mode: LayerMode) -> Iterator[AdaptedPlace]:
        has = {"has_output": self.has_output, "has_input": self.has_input, "has_experts": self.has_experts}
        return adapted_places(model.config, layer_mode, **has)

    def add_slots(self, hidden_te: jax.Array, slots_t: jax.Array) -> jax.Array:
        """Return hidden states followed by their slots, `[T, E + 1]`; unchanged without slots of the output matrix.

        Their type represents every slot: there are at most 256.
        """
        if not self.has_output:
            return hidden_te
        return jnp.concatenate([hidden_te, slots_t.astype(hidden_te.dtype)[:, None]], axis=1)

    def without_slots(self, hidden_re: jax.Array) -> jax.Array:
        """Return the hidden states alone."""
        return hidden_re[:, :-1] if self.has_output else hidden_re

    def bind(self, params: Params, hidden_re: jax.Array, config: ModelConfig) -> Params:
        """Return the parameters with the slots of the hidden states next to the output matrix."""
        if not self.has_output:
            return params
        path = get_output_path(config)
        bound = dataclasses.replace(_at(params, path), adapters_r=hidden_re[:, -1].astype(jnp.int32))
        return _replaced(params, {path: bound})


def get_matrices(params: Params) -> dict[LeafPath, Matrices]:
    """Return the matrices of all slots, by path."""
    found, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=_has_slots)
    return {_keys(path): (leaf.a, leaf.b, leaf.vectors) for path, leaf in found if _has_slots(leaf)}


def _has_slots(leaf: Any) -> bool:
    return isinstance(leaf, AdaptedMatrix | EmbeddingAdapters)


def with_matrices(params: Params, matrices: Mapping[LeafPath, Matrices]) -> Params:
    """Return the parameters with their adapter matrices replaced by `matrices`."""
    adapted = {
        path: dataclasses.replace(_at(params, path), a=a, b=tuple(b), vectors=tuple(vectors))
        for path, (a, b, vectors) in matrices.items()
    }
    return _replaced(params, adapted)


def get_arguments(adapter: HostAdapter, params: Params) -> list[Matrices]:
    """Return an adapter's matrices as the program's arguments, in the order of the slots' matrices."""
    return [(*adapter.matrices[path], adapter.vectors.get(path, ())) for path in get_matrices(params)]


def fill_slot(all_slots: list[Matrices], index: jax.Array, adapter: list[Matrices]) -> list[Matrices]:
    """Write an adapter's matrices over those of a slot; slot s has index s - 1."""

    def fill(stack: jax.Array, one: jax.Array) -> jax.Array:
        axis = stack.ndim - 3  # slots, rank, columns; preceded by layers if they are stacked
        return jax.lax.dynamic_update_index_in_dim(stack, one.astype(stack.dtype), index, axis)

    filled: list[Matrices] = jax.tree.map(fill, all_slots, adapter)
    return filled


def _zeros(shapes: dict[LeafPath, Matrices]) -> dict[LeafPath, Matrices]:
    structs, tree = jax.tree.flatten(list(shapes.values()))
    make = jax.jit(
        lambda: [jnp.zeros(struct.shape, struct.dtype) for struct in structs],
        out_shardings=[struct.sharding for struct in structs],
    )
    return dict(zip(shapes, jax.tree.unflatten(tree, make()), strict=True))


def _keys(path: tuple[Any, ...]) -> LeafPath:
    return tuple(entry.idx if isinstance(entry, jax.tree_util.SequenceKey) else entry.key for entry in path)


def _at(tree: Any, path: LeafPath) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _replaced(params: Params, leaves: Mapping[LeafPath, Any]) -> Params:
    """Return a new tree with these leaves replaced; all other leaves are shared."""

    def copy(tree: Any, path: LeafPath) -> Any:
        if isinstance(tree, dict):
            return {key: copy(inner, (*path, key)) for key, inner in tree.items()}
        if isinstance(tree, list):
            return [copy(inner, (*path, index)) for index, inner in enumerate(tree)]
        return leaves.get(path, tree)

    copied: Params = copy(params, ())
    return copied
