"""Checkpoint files <-> parameter trees, one leaf at a time: never a second copy of the model in host memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from jpaged.errors import InvalidArgument
from jpaged.models.config import ModelConfig
from jpaged.models.hf_names import LM_HEAD, Leaf, is_ignored, layer_leaves, name_prefix, outer_leaves
from jpaged.models.layers import LayerMode
from jpaged.models.model import Model
from jpaged.models.parts import Params
from jpaged.models.tensor_files import SINGLE_FILE, TensorFiles

# Place of a leaf in the tree: ("layers", 3, "mlp", "down", "kernel"), without the number in scan mode.
LeafPath = tuple[str | int, ...]
Put = Callable[[LeafPath, np.ndarray], jax.Array]
Progress = Callable[[int, int, str], None]


def put_on_default_device(path: LeafPath, array: np.ndarray) -> jax.Array:
    """Copies one leaf to the default device, and waits, so that the host's copy can go."""
    return jax.block_until_ready(jax.device_put(array))


def no_progress(done: int, total: int, name: str) -> None:
    """Reports nothing."""


def random_params(model: Model, layer_mode: LayerMode, *, seed: int) -> Params:
    """Random parameters of the model's shapes, for measuring without a checkpoint."""
    # Filling large arrays from a threefry key takes minutes to compile on a CPU; these numbers are no secret.
    return model.init_params(jax.random.key(seed % 2**32, impl="rbg"), layer_mode)


def load_params(
    model: Model,
    folder: Path,
    layer_mode: LayerMode,
    *,
    put: Put = put_on_default_device,
    progress: Progress = no_progress,
) -> Params:
    """Reads a checkpoint in Hugging Face layout into the tree of `model.abstract_params(layer_mode)`.

    Host memory holds the tensors of one leaf at a time and the leaf made of them (in scan mode, that leaf for all
    layers); the files are memory-mapped.

    Args:
        model: what to load; its dtype is what leaves are cast to.
        folder: the checkpoint.
        layer_mode: one tree a layer, or one with stacked leaves.
        put: makes the device array of a leaf; a sharded placement goes here.
        progress: called after each leaf with (done, total, name).

    Raises:
        InvalidArgument: a tensor is missing, left over, misshapen or not tied as promised; it is named, with its file.
        Unsupported: the weights are in a format or a type that is not read.
    """
    config = model.config
    params: Params = {"layers": {} if layer_mode == "scan" else [{} for _ in range(config.num_layers)]}
    with TensorFiles(folder) as files:
        groups = _leaf_groups(config, name_prefix(config, files.names), layer_mode)
        _check_names(files, [name for _, leaves in groups for leaf in leaves for name, _ in leaf.tensors], config)
        for done, (path, leaves) in enumerate(groups, start=1):
            is_stacked = layer_mode == "scan" and path[0] == "layers"
            array = _read_stack(files, leaves, model.dtype) if is_stacked else _read(files, leaves[0], model.dtype)
            _insert(params, path, put(path, array))
            progress(done, len(groups), ".".join(map(str, path)))
        _check_tie(files, config)
    return params


def save_safetensors(params: Params, config: ModelConfig, folder: Path) -> None:
    """Writes config.json and model.safetensors in Hugging Face layout, in the type of the parameters.

    Args:
        params: a tree in either layer mode.
        config: its shape.
        folder: created where it is missing; files of the same names are replaced.
    """
    tensors: dict[str, np.ndarray] = {}

    def add(leaf: Leaf, array: np.ndarray) -> None:
        for (name, _), tensor in zip(leaf.tensors, leaf.unpack(array), strict=True):
            tensors[name] = np.ascontiguousarray(tensor)

    prefix = name_prefix(config)
    for leaf in outer_leaves(config, prefix):
        add(leaf, np.asarray(_find(params, leaf.path)))
    layers = params["layers"]
    for index in range(config.num_layers):
        for leaf in layer_leaves(config, index, prefix):
            add(
                leaf,
                np.asarray(
                    _find(layers[index], leaf.path) if isinstance(layers, list) else _find(layers, leaf.path)[index]
                ),
            )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})


def _leaf_groups(config: ModelConfig, prefix: str, layer_mode: LayerMode) -> list[tuple[LeafPath, Sequence[Leaf]]]:
    """The leaves of the tree by their places; in scan mode a place in the layers stands for that leaf of each."""
    layers = [layer_leaves(config, layer_index, prefix) for layer_index in range(config.num_layers)]
    groups: list[tuple[LeafPath, Sequence[Leaf]]] = [(leaf.path, [leaf]) for leaf in outer_leaves(config, prefix)]
    if layer_mode == "scan":
        return groups + [(("layers", *stack[0].path), stack) for stack in zip(*layers, strict=True)]
    return groups + [(("layers", index, *leaf.path), [leaf]) for index, leaves in enumerate(layers) for leaf in leaves]


def _check_names(files: TensorFiles, wanted: list[str], config: ModelConfig) -> None:
    left_over = sorted(name for name in files.names.difference(wanted) if not is_ignored(name, config))
    if left_over:
        shown = ", ".join(f"{name} ({files.where(name)})" for name in left_over[:5])
        raise InvalidArgument(
            "checkpoint", f"{len(left_over)} tensors are not part of {config.architecture} with this config: {shown}"
        )


def _check_tie(files: TensorFiles, config: ModelConfig) -> None:
    if not config.tie_word_embeddings or LM_HEAD not in files.names:
        return
    embedding, *_ = outer_leaves(config, name_prefix(config, files.names))
    ((name, shape),) = embedding.tensors
    if not np.array_equal(files.read(LM_HEAD, shape), files.read(name, shape)):
        raise InvalidArgument(
            str(files.where(LM_HEAD)),
            f"{LM_HEAD} differs from {name} though config.json says tie_word_embeddings; set that to false",
        )


def _read(files: TensorFiles, leaf: Leaf, dtype: np.dtype) -> np.ndarray:
    array = np.empty(leaf.shape, dtype)
    leaf.pack([files.read(name, shape) for name, shape in leaf.tensors], array)
    return array


def _read_stack(files: TensorFiles, leaves: Sequence[Leaf], dtype: np.dtype) -> np.ndarray:
    stack = np.empty((len(leaves), *leaves[0].shape), dtype)
    for array, leaf in zip(stack, leaves, strict=True):
        leaf.pack([files.read(name, shape) for name, shape in leaf.tensors], array)
    return stack


def _insert(params: Any, path: LeafPath, value: jax.Array) -> None:
    for key in path[:-1]:
        params = params[key] if isinstance(key, int) else params.setdefault(key, {})
    params[path[-1]] = value


def _find(params: Any, path: Sequence[str]) -> jax.Array:
    for key in path:
        params = params[key]
    return params
