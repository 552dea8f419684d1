"""Parameters on devices, seen as the tensors of a checkpoint: one leaf of them in host memory at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from jpaged.checkpoints.names import model_leaves
from jpaged.checkpoints.tensor_source import DTYPES, check_shape, unsupported_dtype
from jpaged.errors import Unsupported
from jpaged.models.config import ModelConfig
from jpaged.models.layers import Params
from jpaged.models.leaves import Leaf
from jpaged.models.sharding import padded_axis


class ParamTensors:
    """A tree of parameters as a `TensorSource`: names, shapes and orientation of Hugging Face, as published.

    The tensors of one leaf are best read one after another: the leaf that was read last is kept.

    Args:
        params: in either layer mode, on whatever mesh.
        config: of the model as published.
        num_parts: the tree is that of the model padded for so many (`jpaged.models.sharding`).

    Raises:
        Unsupported: parts of the parameters are on devices of other processes.
    """

    def __init__(self, params: Params, config: ModelConfig, num_parts: int = 1) -> None:
        for leaf in jax.tree.leaves(params):
            if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                raise Unsupported("parameters that are spread over processes cannot be saved; one must have them all")
        self._params = params
        self._num_parts = num_parts
        self._places: dict[str, tuple[int | None, Leaf, int]] = {}
        self._kept: tuple[tuple[int | None, tuple[str, ...]], list[np.ndarray]] | None = None
        leaves = model_leaves(config)
        places: list[tuple[int | None, Leaf]] = [(None, leaf) for leaf in leaves.outer]
        places += [(index, leaf) for index, layer in enumerate(leaves.layers) for leaf in layer]
        for layer, leaf in places:
            for number, (name, _) in enumerate(leaf.tensors):
                self._places[name] = layer, leaf, number

    @property
    def names(self) -> frozenset[str]:
        """Every tensor of the model; a tied embedding is there once."""
        return frozenset(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, as the config makes it."""
        _, leaf, number = self._places[name]
        return leaf.tensors[number][1]

    def dtype(self, name: str) -> np.dtype:
        """The type of the leaf which the tensor is in."""
        layer, leaf, _ = self._places[name]
        stored = np.dtype(self._array(layer, leaf).dtype)
        if stored.name not in DTYPES:
            raise unsupported_dtype(self.where(name), name, stored.name)
        return stored

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> np.ndarray:
        """See `TensorSource.read`; the whole leaf comes to the host."""
        check_shape(self, name, shape)
        layer, leaf, number = self._places[name]
        if self._kept is None or self._kept[0] != (layer, leaf.path):
            self._kept = None
            self._kept = (layer, leaf.path), [np.asarray(part) for part in leaf.unpack(self._published(layer, leaf))]
        tensor = self._kept[1][number]
        return tensor[index] if index else tensor

    def where(self, name: str) -> Path:
        """A name for errors: they are in no file."""
        return Path("parameters")

    def _array(self, layer: int | None, leaf: Leaf) -> Any:
        tree: Any = self._params
        if layer is not None:
            layers = tree["layers"]
            tree = layers[layer] if isinstance(layers, list) else layers
        for key in leaf.path:
            tree = tree[key]
        return tree

    def _published(self, layer: int | None, leaf: Leaf) -> np.ndarray:
        array = self._array(layer, leaf)
        if layer is not None and not isinstance(self._params["layers"], list):
            array = array[layer]
        split = padded_axis(leaf.axes, leaf.shape, self._num_parts)
        return np.asarray(array) if split is None else split.narrowed(np.asarray(array))
