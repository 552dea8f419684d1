"""Parameters on devices -> a checkpoint folder: what `jpaged.checkpoints.weights` does, undone."""

from __future__ import annotations

import functools
import math
import operator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from jpaged import json_text
from jpaged.checkpoints.hub import CONFIG_FILE
from jpaged.checkpoints.names import model_leaves
from jpaged.checkpoints.tensor_files import SINGLE_FILE
from jpaged.models.config import ModelConfig
from jpaged.models.hf_config import to_hf
from jpaged.models.layer_kinds import get_stacks
from jpaged.models.layers import Params
from jpaged.models.param_specs import Leaf
from jpaged.models.sharding import padded_axis


def save_params(params: Params, config: ModelConfig, folder: Path, *, num_parts: int = 1) -> None:
    """Write all tensors as published, in the type that they have.

    Args:
        params: the tree, in either layer mode, on whatever mesh of this process.
        config: of the model as published, not padded.
        folder: a new one.
        num_parts: the tree is that of the model padded for so many.
    """
    leaves, layers = model_leaves(config), params["layers"]
    tensors: dict[str, np.ndarray] = {}
    for leaf in leaves.outer:
        tensors |= leaf_tensors(leaf, _find(params, leaf), num_parts)
    stacks = {} if isinstance(layers, list) else get_stacks(config.layer_kinds)
    places = {index: (name, place) for name, stacked in stacks.items() for place, index in enumerate(stacked)}
    for index, layer in enumerate(leaves.layers):
        for leaf in layer:
            if isinstance(layers, list):
                array = _find(layers[index], leaf)
            else:
                name, place = places[index]
                array = _find(layers[name], leaf)[place]
            for name, tensor in leaf_tensors(leaf, array, num_parts).items():
                tensors[name] = tensors[name] + tensor if name in tensors else tensor
    (dtype,) = {tensor.dtype.name for tensor in tensors.values()}
    folder.mkdir(parents=True)
    text = json_text.dumps(to_hf(config) | {"dtype": dtype}, indent=2) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})


def leaf_tensors(leaf: Leaf, array: jax.Array, num_parts: int = 1) -> dict[str, np.ndarray]:
    """Return the tensors of a leaf: numbers packed in place of values show where each of them went.

    Of a tensor that several leaves share, what is another's is 0.
    """
    sizes = [math.prod(shape) for _, shape in leaf.tensors]
    ends = np.cumsum(sizes)[:-1]
    numbers = np.split(np.arange(1, sum(sizes) + 1), ends)  # 0 is what padding adds
    places = np.empty(leaf.shape, np.int64)
    leaf.pack([part.reshape(shape) for part, (_, shape) in zip(numbers, leaf.tensors, strict=True)], places)
    split = padded_axis(leaf, num_parts)
    if split is not None:
        places = split.padded(places, 0, split.wide_size)
    flat = np.zeros(sum(sizes) + 1, array.dtype)
    flat[places] = np.asarray(array)
    parts = np.split(flat[1:], ends)
    return {name: part.reshape(shape) for part, (name, shape) in zip(parts, leaf.tensors, strict=True)}


def _find(tree: Params, leaf: Leaf) -> Any:
    return functools.reduce(operator.getitem, leaf.path, tree)
