"""A model as its callers see it: random parameters, tokens to hidden states, hidden states to logits.

The parameter tree of a quantized model has the shapes and the names of axes of its quantized matrices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.errors import InvalidArgument
from jpaged.kernels.matmul.quantized import abstract_matrix, component_axes
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.models.config import ModelConfig, Quantization
from jpaged.models.layer_kinds import KVPlace, LayerKind, get_stacks
from jpaged.models.layers import Attend, Ends, Measured, Module, Params, RandomKeys, join_states, split_states
from jpaged.models.param_specs import EXPERT_AXES, Leaf, LogicalAxes, contracted_axis, is_uniform, leaf_format
from jpaged.models.registry import find_family
from jpaged.models.stack import Layer, LayerMode, LayerPlace, can_pipeline, run_layers, run_pipelined
from jpaged.models.tokens import InputEmbeds, Rows, TokenBatch

ModuleT = TypeVar("ModuleT", bound=Module)
MatricesOf = Literal["layers", "head", "all"]
LeafPath = tuple[str | int, ...]
"""Place of a leaf in the tree: ("layers", 3, "mlp", "down", "kernel"), in scan mode with the name of a stack."""


def placed_leaves(config: ModelConfig, layer_mode: LayerMode) -> Iterator[tuple[LeafPath, Sequence[Leaf]]]:
    """Yield every place in the tree and its leaf, or the leaves of the layers that are stacked there."""
    family = find_family(config.architecture)
    prefix = family.name_prefix(())
    layers = [
        family.layer_leaves(config, f"{prefix}{family.layers_prefix}{index}.", kind)
        for index, kind in enumerate(config.layer_kinds, config.first_layer)
    ]
    if layer_mode == "scan":
        for name, stacked in get_stacks(config.layer_kinds).items():
            for of_each in zip(*(layers[index] for index in stacked), strict=True):
                yield ("layers", name, *of_each[0].path), of_each
    else:
        for index, of_layer in enumerate(layers):
            for leaf in of_layer:
                yield ("layers", index, *leaf.path), (leaf,)
    for leaf in family.outer_leaves(config, prefix):
        yield leaf.path, (leaf,)


def insert(tree: Any, path: Sequence[str | int], value: Any) -> None:
    """Set a value at a path in a tree; lists must exist, dictionaries are created."""
    for key in path[:-1]:
        tree = tree[key] if isinstance(key, int) else tree.setdefault(key, {})
    tree[path[-1]] = value


def dense_formats(config: ModelConfig, part: MatricesOf = "all") -> frozenset[MatrixFormat]:
    """Return the formats of the quantized matrices that all rows are multiplied with, in the layers or after them."""
    if config.quantization is None:
        return frozenset()
    found = (
        leaf_format(config.quantization, leaf)
        for path, leaves in placed_leaves(config, "loop")
        for leaf in leaves
        if EXPERT_AXES.isdisjoint(leaf.axes) and part in ("all", "layers" if path[0] == "layers" else "head")
    )
    return frozenset(form for form in found if form is not None)


def layer_formats(config: ModelConfig) -> frozenset[MatrixFormat]:
    """Return the formats of the quantized matrices of the layers, including those of experts."""
    quantization = config.quantization
    if quantization is None:
        return frozenset()
    of_layers = (leaf for path, leaves in placed_leaves(config, "loop") if path[0] == "layers" for leaf in leaves)
    return frozenset(form for leaf in of_layers if (form := leaf_format(quantization, leaf)) is not None)


def can_stack(config: ModelConfig) -> bool:
    """Return True if layers that would be stacked have the same formats."""
    quantization = config.quantization
    return quantization is None or all(is_uniform(quantization, leaves) for _, leaves in placed_leaves(config, "scan"))


def leaf_axes(quantization: Quantization | None, leaf: Leaf, dtype: np.dtype, *, is_stacked: bool) -> Any:
    """Return the axis names of a leaf, or those of all arrays of a quantized one; an axis of layers comes first."""
    axes: LogicalAxes = ("layers", *leaf.axes) if is_stacked else leaf.axes
    form = leaf_format(quantization, leaf)
    return axes if form is None else component_axes(axes, contracted_axis(leaf), form, dtype)


def put_quantized(shapes: Any, config: ModelConfig, layer_mode: LayerMode, dtype: np.dtype) -> None:
    """Replace the shapes of matrices that are quantized by their quantized forms in a tree of shapes, in place."""
    for path, (leaf, *_) in placed_leaves(config, layer_mode):
        form = leaf_format(config.quantization, leaf)
        if form is not None:
            inside = shapes
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = abstract_matrix(form, inside[path[-1]].shape, contracted_axis(leaf), dtype)


DTYPES = ("float32", "bfloat16", "float16")
"""Types of parameters and activations; matmuls, norms and softmax compute in float32 in each of them."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model as a description: hashable, without arrays, static under jit.

    It is independent of blocks, batches and sampling: tokens come packed in one axis T, and attention is injected.
    T is at least 2 in 16 bits: on CPUs a matmul with one row is ten times slower than with two.

    Attributes:
        dtype: type of parameters and activations, one of `DTYPES`.

    Raises:
        InvalidArgument: dtype is another.
    """

    config: ModelConfig
    dtype: np.dtype

    def __post_init__(self) -> None:
        dtype = np.dtype(self.dtype)
        if dtype.name not in DTYPES:
            raise InvalidArgument("dtype", f"is {dtype.name}; it must be one of {', '.join(DTYPES)}")
        object.__setattr__(self, "dtype", dtype)

    def abstract_params(self, layer_mode: LayerMode) -> Params:
        """Return shapes and types of the parameter tree, with its quantized matrices."""
        config = self.config
        params: Params = {"layers": {} if layer_mode == "scan" else [{} for _ in range(config.num_layers)]}
        for path, (leaf, *others) in placed_leaves(config, layer_mode):
            is_stacked = layer_mode == "scan" and path[0] == "layers"
            shape = (1 + len(others), *leaf.shape) if is_stacked else leaf.shape
            insert(params, path, jax.ShapeDtypeStruct(shape, leaf.dtype or self.dtype))
        if config.quantization is not None:
            put_quantized(params, config, layer_mode, self.dtype)
        return params

    def init_params(self, key: jax.Array, layer_mode: LayerMode) -> Params:
        """Return random parameters: normal with a standard deviation of 0.02, norms of one, biases of zero.

        None is quantized. Both layer modes sample the same numbers.
        """
        config, dtype, modules = self.config, self.dtype, find_family(self.config.architecture).modules()
        begin_key, end_key, layers_key = jax.random.split(key, 3)

        @functools.partial(jax.jit, static_argnames="kind")
        def init_layer(key: jax.Array, kind: LayerKind) -> Params:
            return modules.layer(config, dtype, RandomKeys(key), kind).params()

        keys, kinds = jax.random.split(layers_key, config.num_layers), config.layer_kinds
        layers: Any = [init_layer(keys[i], kind=kind) for i, kind in enumerate(kinds)] if layer_mode == "loop" else {}
        for name, stacked in get_stacks(kinds).items() if layer_mode == "scan" else ():
            layers[name] = jax.vmap(functools.partial(init_layer, kind=kinds[stacked[0]]))(keys[np.array(stacked)])
        return {**modules.ends(config, dtype, (begin_key, end_key)).params(), "layers": layers}

    def run(
        self,
        params: Params,
        tokens: TokenBatch,
        attend: Attend,
        carry: Any,
        layer_mode: LayerMode,
        kv_places: Sequence[KVPlace] | None = None,
    ) -> tuple[jax.Array, Any]:
        """Map tokens to the hidden states of the last layer.

        A pure function of the arrays: it can be jitted, differentiated, and mapped over a batch with vmap.

        Args:
            params: the tree of `abstract_params(layer_mode)`.
            attend: attention. It stores k and v in the carry, and computes the layer's attention kind; query head h
                reads key/value head h // (H / K).
            carry: state that attend threads through the layers: the KV pool when serving, `()` when training.
            layer_mode: how the layers run; see `run_layers`.
            kv_places: place of each layer's keys and values; None is one group of all layers in order.

        Returns:
            hidden states `[T, E]` in the model's type, and the carry.
        """
        hidden_te, carry, _ = self.run_watched(params, tokens, attend, carry, layer_mode, (), kv_places)
        return hidden_te, carry

    def run_watched(
        self,
        params: Params,
        tokens: TokenBatch,
        attend: Attend,
        carry: Any,
        layer_mode: LayerMode,
        watched: Sequence[int],
        kv_places: Sequence[KVPlace] | None = None,
    ) -> tuple[jax.Array, Any, list[jax.Array]]:
        """Run as `run`, and also return the hidden states `[T, E]` that some layers take as input.

        Args:
            watched: numbers of layers; the number of layers stands for the last one's output.
        """
        ends, config = self._ends(params), self.config
        x, shared = ends.begin(tokens)
        layer = self._layer(shared, attend, tokens.embeds)
        places = [(0, index) for index in range(config.num_layers)] if kv_places is None else kv_places
        if tokens.num_column_parts > 1:
            halves = _Halves(config, self.dtype, shared, attend)
            parts = split_states(ends.end(x), tokens.num_row_chunks, tokens.num_column_parts)
            parts, carry, of_watched = run_pipelined(
                halves, params["layers"], parts, carry, config.layer_kinds, places, watched=watched
            )
            return join_states(parts), carry, [join_states(one) for one in of_watched]
        x, carry, seen = run_layers(
            layer, params["layers"], x, carry, config.layer_kinds, places, mode=layer_mode, watched=watched
        )
        return ends.end(x), carry, [ends.end(one) for one in seen]

    def begin(self, params: Params, tokens: TokenBatch) -> Any:
        """Return the input of the first layer: hidden states, or a tree with them."""
        return self._ends(params).begin(tokens)[0]

    def run_stage(
        self,
        params: Params,
        tokens: TokenBatch,
        attend: Attend,
        carry: Any,
        kv_places: Sequence[KVPlace],
        x: tuple[jax.Array, Any],
    ) -> tuple[Any, Any, jax.Array]:
        """Run some of the layers, which are a stage of a pipeline (`divides_into_stages`), in the layer mode `scan`.

        Args:
            params: `layers` has those of the stage.
            kv_places: of the stage's layers.
            x: whether the stage is the first one, which begins with the tokens, and the input of others: the result of
                the previous stage for the same tokens.

        Returns:
            the input of the next stage, the carry, and, for the last stage, the hidden states `[T, E]`.
        """
        ends, (is_first, received) = self._ends(params), x
        begun, shared = ends.begin(tokens)
        own = jax.tree.map(lambda mine, other: jnp.where(is_first, mine, other), begun, received)
        kinds, layer = self.config.layer_kinds[: len(kv_places)], self._layer(shared, attend)
        result, carry, _ = run_layers(layer, params["layers"], own, carry, kinds, kv_places, mode="scan")
        return result, carry, ends.end(result)

    @property
    def takes_column_parts(self) -> bool:
        """True if tokens may have several column parts: see `TokenBatch`."""
        config = self.config
        if config.vision is not None and config.vision.deep_layers:
            return False
        if config.quantization is not None or not can_pipeline(config.layer_kinds):
            return False
        return bool(getattr(_layer_structure(config, self.dtype, config.layer_kinds[0]), "takes_parts", False))

    def combine(self, params: Params, features_tf: jax.Array, num_rows: jax.Array) -> jax.Array:
        """Return a head's input states `[T, E]` from the model's hidden states `[T, F]` that it takes, concatenated.

        The first `num_rows` rows are in use.
        """
        return self._ends(params).combine(features_tf, Rows(num_rows))

    def own_states(self, params: Params, hidden_te: jax.Array) -> jax.Array:
        """Return a head's input states `[T, E]` from its own hidden states `[T, E]`, for the next proposal."""
        return self._ends(params).own_states(hidden_te)

    def logits(self, params: Params, hidden_re: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        """Map hidden states `[R, E]` to float32 logits `[R, V]`, by the final norm and the output matrix.

        Reads no parameters of layers. The first `num_rows` rows are in use; None is all.
        """
        return self._ends(params).logits(hidden_re, jnp.int32(len(hidden_re)) if num_rows is None else num_rows)

    def normed(self, params: Params, hidden_re: jax.Array) -> jax.Array:
        """Return hidden states `[R, E]` of the last layer after the final norm."""
        return self._ends(params).normed(hidden_re)

    def _layer(self, shared: Any, attend: Attend, embeds: InputEmbeds | None = None) -> Layer:
        vision = self.config.vision
        has_added = embeds is not None and vision is not None and bool(vision.deep_layers)

        def layer(params: Params, x: Any, carry: Any, place: LayerPlace) -> tuple[Any, Any]:
            module: Any = _layer_structure(self.config, self.dtype, place.kind).with_params(params)
            result: tuple[Any, Any] = module(x, shared, attend, carry, place)
            if not has_added or embeds is None:
                return result
            added = embeds.add(result[0].x_te, place.index)
            return Measured.of(added, is_measured=result[0].squares_t is not None), result[1]

        return layer

    def _ends(self, params: Params) -> Ends:
        return _ends_structure(self.config, self.dtype).with_params(params)


@dataclass(frozen=True, slots=True)
class _Halves:
    """The layers of a model, with the values that they share; see `LayerHalves`."""

    config: ModelConfig
    dtype: np.dtype
    shared: Any
    attend: Attend

    def project(self, layer_params: Params, x: Any, kind: LayerKind) -> Any:
        return self._module(layer_params, kind).project(x)

    def finish(self, layer_params: Params, x: Any, projected: Any, carry: Any, place: LayerPlace) -> tuple[Any, Any]:
        result: tuple[Any, Any] = self._module(layer_params, place.kind).finish(
            x, projected, self.shared, self.attend, carry, place
        )
        return result

    def _module(self, layer_params: Params, kind: LayerKind) -> Any:
        return _layer_structure(self.config, self.dtype, kind).with_params(layer_params)


# Modules without their arrays: parameters are merged into copies of them while tracing.
@functools.lru_cache(maxsize=64)
def _layer_structure(config: ModelConfig, dtype: np.dtype, kind: LayerKind) -> Module:
    layer = find_family(config.architecture).modules().layer
    return _without_arrays(lambda key: layer(config, dtype, RandomKeys(key), kind))


@functools.lru_cache(maxsize=32)
def _ends_structure(config: ModelConfig, dtype: np.dtype) -> Ends:
    ends = find_family(config.architecture).modules().ends

    def make(key: jax.Array) -> Ends:
        begin_key, end_key = jax.random.split(key)
        return ends(config, dtype, (begin_key, end_key))

    return _without_arrays(make)


def _without_arrays(make: Callable[[jax.Array], ModuleT]) -> ModuleT:
    """Return the module that `make` builds from a random key, without computing an array."""
    made: list[ModuleT] = []

    def build(key: jax.Array) -> None:
        made.append(make(key).with_params(None))

    jax.eval_shape(build, jax.eval_shape(jax.random.key, 0))  # a real key would need a program to be compiled
    return made[0]
