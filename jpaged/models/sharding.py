"""Sharding of a model over devices: the logical axes of leaves, and the padded model that splits evenly.

    one copy of the model in n parts    each part holds
    query heads H                       H / n, with the key/value heads that they read
    key/value heads K                   K / n; if K < n one, and each is stored by n / K parts
    feed-forward width F                F / n, of each expert, too
    experts X, if they are parallel     X / n, whole
    vocabulary V                        V / n, the last part padded

If attention is data-parallel, each part holds all heads and the shared expert, and the KV cache of some sequences.

`pad_for_sharding` puts padding and repeated heads into the config: programs and shardings see a model whose sizes all
divide evenly, and reading a checkpoint fills it (`jpaged.checkpoints.weights`).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jpaged.errors import InvalidArgument
from jpaged.models.config import ModelConfig
from jpaged.models.layers import Params
from jpaged.models.model import insert, leaf_axes, placed_leaves
from jpaged.models.param_specs import GroupedHeads, Leaf
from jpaged.models.stack import LayerMode

_FLOAT32 = np.dtype(np.float32)


def logical_axes(config: ModelConfig, layer_mode: LayerMode, dtype: np.dtype = _FLOAT32) -> Params:
    """Return the parameter tree with the names of each leaf's axes in its place.

    In `scan` the leaves of layers have an axis of layers first.

    Args:
        dtype: of the model, which its quantized matrices depend on.
    """
    axes: Params = {"layers": {} if layer_mode == "scan" else [{} for _ in range(config.num_layers)]}
    for path, (leaf, *_) in placed_leaves(config, layer_mode):
        is_stacked = layer_mode == "scan" and path[0] == "layers"
        insert(axes, path, leaf_axes(config.quantization, leaf, dtype, is_stacked=is_stacked))
    return axes


@dataclasses.dataclass(frozen=True, slots=True)
class PaddedAxis:
    """The one axis along which a leaf is split, between the model as published and the padded one.

    Attributes:
        axis: its index in the leaf, not counting an axis of layers.
        size: of the published model.
        wide_size: of the padded one.
        heads: of the published model, if they lie along it.
        repeats: copies of each key/value head in the padded model; its queries are distributed over them.
    """

    axis: int
    name: str
    size: int
    wide_size: int
    heads: GroupedHeads | None = None
    repeats: int = 1

    def padded_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the leaf in the padded model."""
        return (*shape[: self.axis], self.wide_size, *shape[self.axis + 1 :])

    def source(self, begin: int, end: int) -> tuple[int, int]:
        """Return the range of the published leaf that holds a range of the padded one."""
        if self.heads is not None:
            of_group, of_copies = self.heads.group_size, self.repeats * self.heads.repeated(self.repeats).group_size
            return begin // of_copies * of_group, -(-end // of_copies) * of_group
        return min(begin, self.size), min(end, self.size)

    def padded(self, array: np.ndarray, begin: int, end: int) -> np.ndarray:
        """Convert the array of a `source` range to the range of the padded leaf.

        An axis of layers may come first.
        """
        if self.name == "vocab":
            padded = np.zeros((end - begin, *array.shape[1:]), array.dtype)
            padded[: len(array)] = array
            return padded
        if self.heads is not None:
            first = begin % (self.repeats * self.heads.repeated(self.repeats).group_size)
            return repeat_groups(array, self.heads, self.repeats)[..., first : first + end - begin]
        return array


def padded_axis(leaf: Leaf, num_parts: int) -> PaddedAxis | None:
    """Return how a leaf of the published model is split into parts; None if it is whole everywhere."""
    for axis, (name, size) in enumerate(zip(leaf.axes, leaf.shape, strict=True)):
        if leaf.heads is not None and name == "kv_heads":
            repeats = max(1, num_parts // leaf.heads.num_kv_heads)
            return PaddedAxis(axis, name, size, leaf.heads.repeated(repeats).size, leaf.heads, repeats)
        if name == "vocab":
            return PaddedAxis(axis, name, size, _rounded_up(size, num_parts))
        if name in ("heads", "feed_forward", "expert_parts"):
            return PaddedAxis(axis, name, size, size)
    return None


def repeat_groups(qkv: np.ndarray, heads: GroupedHeads, repeats: int) -> np.ndarray:
    """Return columns of key/value heads with each head repeated, each copy with its share of the queries, G / repeats.

    Args:
        qkv: `[..., k * (G + 2) * D]`.
        heads: of the model; the columns may be a part of them.
    """
    if repeats == 1:
        return qkv
    group, outer = heads.group, qkv.shape[:-1]
    groups = qkv.reshape(*outer, -1, group + 2, heads.head_dim)
    q = groups[..., :group, :].reshape(*outer, -1, group // repeats, heads.head_dim)
    repeated = np.concatenate((q, np.repeat(groups[..., group:, :], repeats, axis=-3)), axis=-2)
    return repeated.reshape(*outer, -1)


def pad_for_sharding(config: ModelConfig, num_parts: int) -> ModelConfig:
    """Return the config whose key/value heads and vocabulary divide evenly, as described above; itself for one part.

    Raises:
        InvalidArgument: the heads or the feed-forward width cannot be divided; names the numbers that work.
    """
    if not _divides(config, num_parts):
        working = [n for n in range(1, config.num_heads + 1) if _divides(config, n)]
        mixture = "" if config.mixture is None else f", {config.mixture}"
        heads = f"{config.num_heads} query heads, {config.num_kv_heads} key/value heads"
        if config.num_recurrent_layers:
            heads += f", {config.num_recurrent_parts} parts of recurrent layers"
        raise InvalidArgument(
            "tensor_parallel_size",
            f"{num_parts} does not divide {heads}{mixture} and a feed-forward width of {config.intermediate_size}; "
            f"{', '.join(map(str, working))} work",
        )
    return dataclasses.replace(
        config,
        num_kv_heads=config.num_kv_heads if config.has_dp_attention else max(config.num_kv_heads, num_parts),
        vocab_size=_rounded_up(config.vocab_size, num_parts),
        quantization=None if config.quantization is None else config.quantization.split(num_parts),
    )


def largest_split(config: ModelConfig, num_devices: int) -> int:
    """Return the largest number of parts that the model can be split into, up to `num_devices`."""
    return max(n for n in range(1, num_devices + 1) if n == 1 or _divides(config, n))


def _rounded_up(size: int, num_parts: int) -> int:
    return -(-size // num_parts) * num_parts


def _divides(config: ModelConfig, num_parts: int) -> bool:
    has_groups = config.num_kv_heads % num_parts == 0 or num_parts % config.num_kv_heads == 0
    has_heads = config.has_dp_attention or (config.num_heads % num_parts == 0 and has_groups)
    has_widths = all(kind.is_sparse for kind in config.layer_kinds) or config.intermediate_size % num_parts == 0
    has_experts = config.mixture is None or config.mixture.divides(num_parts)
    has_states = not config.num_recurrent_layers or config.num_recurrent_parts % num_parts == 0
    return has_heads and has_widths and has_experts and has_states


def with_parallel_experts(config: ModelConfig) -> ModelConfig:
    """Return the config with expert parallelism: each device has some whole experts, instead of a part of each.

    Raises:
        InvalidArgument: the model has no experts.
    """
    if config.mixture is None:
        raise InvalidArgument("enable_expert_parallel", f"is on, but {config.architecture} has no experts")
    return dataclasses.replace(config, mixture=dataclasses.replace(config.mixture, is_parallel=True))


def with_dp_attention(config: ModelConfig) -> ModelConfig:
    """Return the config with data-parallel attention: each device runs the attention of some sequences.

    Raises:
        InvalidArgument: keys are not latents, or devices have parts of experts. Heads that divide over the devices
            split the cache already.
    """
    if config.value_dim is None:
        raise InvalidArgument(
            "enable_dp_attention", f"is on, but {config.architecture} has no latent cache, which devices would repeat"
        )
    mixture = config.mixture and dataclasses.replace(config.mixture, shared_is_whole=True)
    if mixture is not None and not mixture.is_parallel:
        raise InvalidArgument("enable_dp_attention", "is on, but enable_expert_parallel is off; it must be on")
    return dataclasses.replace(config, mixture=mixture, has_dp_attention=True)
