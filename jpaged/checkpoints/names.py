"""Names of the tensors in a model's checkpoint, and their sizes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from jpaged.checkpoints.tensor_files import TensorSource
from jpaged.errors import InvalidArgument
from jpaged.kernels.matrix_format import NUM_BITS
from jpaged.models.config import ModelConfig
from jpaged.models.family import AnyFamily
from jpaged.models.param_specs import SPLIT_AXES, Leaf, contracted_axis, leaf_format
from jpaged.models.registry import find_family

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class ModelLeaves:
    """Every leaf of a model's parameters.

    Attributes:
        outer: leaves outside the layers, the embedding first.
        layers: leaves of each layer, in the same order for layers of one kind; paths start inside the layer.
    """

    outer: list[Leaf]
    layers: list[list[Leaf]]


def model_leaves(config: ModelConfig, stored: Iterable[str] = ()) -> ModelLeaves:
    """Return the leaves, with tensor names that match a checkpoint with the `stored` names."""
    family, names = find_family(config.architecture), frozenset(stored)
    prefix = _prefix(family, config, names)
    layers = [
        family.layer_leaves(config, f"{prefix}{family.layers_prefix}{index}.", kind)
        for index, kind in enumerate(config.layer_kinds, config.first_layer)
    ]
    for part, other in family.other_names:
        layers = [[_renamed(leaf, part, other, names) for leaf in layer] for layer in layers]
    outer = family.outer_leaves(config, prefix)
    if config.tie_word_embeddings and family.lm_head in names:
        ((embedding, shape),) = outer[0].tensors
        if embedding not in names:
            outer[0] = dataclasses.replace(outer[0], tensors=((family.lm_head, shape),))
    return ModelLeaves(outer, layers)


def _renamed(leaf: Leaf, part: str, other: str, names: Collection[str]) -> Leaf:
    """Return the leaf with a part of the tensors' names replaced, if the checkpoint has them under the other names."""
    tensors = tuple((name.replace(part, other), shape) for name, shape in leaf.tensors)
    is_stored = tensors != leaf.tensors and all(name in names for name, _ in tensors)
    return dataclasses.replace(leaf, tensors=tensors) if is_stored else leaf


def _prefix(family: AnyFamily, config: ModelConfig, names: Collection[str]) -> str:
    """Return the prefix of tensors' names; none if the class without a head was saved, as transformers accepts it."""
    prefix = family.name_prefix(names)
    if not names or any(name.startswith(prefix) for name in names):
        return prefix
    outer = {name for leaf in family.outer_leaves(config, "") for name, _ in leaf.tensors}
    return "" if any(name in outer or name.startswith(family.layers_prefix) for name in names) else prefix


@functools.cache
def num_params(config: ModelConfig) -> int:
    """Return the number of the model's parameters; a tied embedding counts once."""
    leaves = model_leaves(config)
    every = (leaf for each in (leaves.outer, *leaves.layers) for leaf in each)
    return sum(math.prod(leaf.shape) - leaf.num_unused for leaf in every)


def weight_bytes(config: ModelConfig, itemsize: int, num_parts: int = 1) -> float:
    """Return the bytes of the model's parameters, with `itemsize` bytes for each that is not quantized.

    Args:
        num_parts: devices that the model is split over; the result is for one of them.
    """
    leaves, total = model_leaves(config), 0.0
    for leaf in (leaf for each in (leaves.outer, *leaves.layers) for leaf in each):
        is_whole = config.has_dp_attention and SPLIT_AXES.isdisjoint(leaf.axes)
        total += _leaf_bytes(config, leaf, itemsize) / (1 if is_whole else num_parts)
    return total


def embedding_bytes(config: ModelConfig, itemsize: int) -> float:
    """Return the bytes of the embedding of tokens among those of `weight_bytes`."""
    return _leaf_bytes(config, model_leaves(config).outer[0], itemsize)


def _leaf_bytes(config: ModelConfig, leaf: Leaf, itemsize: int) -> float:
    size, form = math.prod(leaf.shape), leaf_format(config.quantization, leaf)
    if form is None:
        return size * itemsize
    depth = leaf.shape[contracted_axis(leaf)]
    of_group = _SCALE_BYTES + (form.zeros_dtype.itemsize if form.has_zeros else 0)
    return size * NUM_BITS[form.values] / 8 + size / depth * form.num_groups(depth) * of_group


_KEYS = (".k_proj.", ".v_proj.", ".k_norm.", ".v_norm.")
"""Parts of names of keys and values, which layers may have that attend to those of another layer."""
SCORE = ("score.weight", "score.bias")
"""Head of classifiers whose layers are those of a model that generates."""


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Return True if a tensor that no leaf uses is known to have no effect.

    Old checkpoints store rotary frequencies, which follow from the config, and causal masks. Multimodal models store
    vision weights. Classifiers store a head, which `pooler.py` reads. Tied models may repeat the embedding; the loader
    checks that both are equal.
    """
    family = find_family(config.architecture)
    if name in SCORE or any(part in name for part in (".rotary_emb.inv_freq", *family.ignored)):
        return True
    if family.ignores_later_layers and _get_layer(name, family) >= config.num_layers:
        return True
    layer = _get_layer(name, family) if any(part in name for part in _KEYS) else -1
    if 0 <= layer < config.num_layers and config.layer_kinds[layer].kv_source is not None:
        return True
    return name == family.lm_head and config.tie_word_embeddings


def _get_layer(name: str, family: AnyFamily) -> int:
    """Return the number of a tensor's layer; -1 if it belongs to none."""
    for prefix in (family.name_prefix(()) + family.layers_prefix, family.layers_prefix):
        number = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
        if number.isdecimal():
            return int(number)
    return -1


def check_tie(files: TensorSource, config: ModelConfig) -> None:
    """Raise InvalidArgument if a stored output matrix differs from the embedding that it is tied to."""
    lm_head = find_family(config.architecture).lm_head
    if not config.tie_word_embeddings or lm_head not in files.names:
        return
    embedding = model_leaves(config, files.names).outer[0]
    ((name, shape),) = embedding.tensors
    if name != lm_head and not np.array_equal(files.read(lm_head, shape), files.read(name, shape)):
        raise InvalidArgument(
            str(files.where(lm_head)),
            f"{lm_head} differs from {name}, but config.json sets tie_word_embeddings; set that to false",
        )
