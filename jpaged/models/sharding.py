"""Sharding of a model over devices: the logical axes of leaves, and the padded model that splits evenly.

    one copy of the model in n parts    each part holds
    query heads H                       H / n, with the key/value heads that they read
    key/value heads K                   K / n; if K < n one, and each is stored by n / K parts
    feed-forward width F                F / n, of each expert, too
    experts X, if they are parallel     X / n, whole
    vocabulary V                        V / n, the last part padded

If attention is data-parallel, each part holds all heads and the shared expert, and the KV cache of some sequences.

If experts are balanced, a part holds P / n physical experts, which `balance_experts` chooses by their load.

`pad_for_sharding` puts padding and repeated heads into the config: programs and shardings see a model whose sizes all
divide evenly, and reading a checkpoint fills it (`jpaged.checkpoints.weights`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from jpaged.errors import InvalidArgument
from jpaged.models.config import ModelConfig
from jpaged.models.layers import Params
from jpaged.models.model import insert, leaf_axes, placed_leaves
from jpaged.models.param_specs import GroupedHeads, Leaf
from jpaged.models.stack import LayerMode

_FLOAT32 = np.dtype(np.float32)
_LEAST_GAIN = 0.02
"""Share of the load of a layer's busiest device that new places of experts must save."""


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
            missing = (end - begin - len(array), *array.shape[1:])
            return array.__array_namespace__().concat([array, np.zeros(missing, array.dtype)]) if missing[0] else array
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
    group, outer, arrays = heads.group, qkv.shape[:-1], qkv.__array_namespace__()  # NumPy's, or JAX's when traced
    groups = qkv.reshape(*outer, -1, group + 2, heads.head_dim)
    q = groups[..., :group, :].reshape(*outer, -1, group // repeats, heads.head_dim)
    kv = arrays.repeat(groups[..., group:, :], repeats, axis=-3)
    repeated: np.ndarray = arrays.concat((q, kv), axis=-2).reshape(*outer, -1)
    return repeated


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
        config if config.has_dp_attention else config.with_kv_heads(num_parts),
        vocab_size=_rounded_up(config.vocab_size, num_parts),
        quantization=None if config.quantization is None else config.quantization.split(num_parts),
    )


def largest_split(config: ModelConfig, num_devices: int) -> int:
    """Return the largest number of parts that the model can be split into, up to `num_devices`."""
    return max(n for n in range(1, num_devices + 1) if n == 1 or _divides(config, n))


def _rounded_up(size: int, num_parts: int) -> int:
    return -(-size // num_parts) * num_parts


def _divides(config: ModelConfig, num_parts: int) -> bool:
    sizes = {config.num_kv_heads, *(kind.heads.num_kv_heads for kind in config.layer_kinds if kind.heads is not None)}
    has_groups = all(size % num_parts == 0 or num_parts % size == 0 for size in sizes)
    has_heads = config.has_dp_attention or (config.num_heads % num_parts == 0 and has_groups)
    is_sparse = all(kind.is_sparse for kind in config.layer_kinds)
    has_dense = not is_sparse or (config.mixture is not None and config.mixture.is_beside)
    has_widths = not has_dense or config.intermediate_size % num_parts == 0
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
        InvalidArgument: keys are not latents, devices have parts of experts, or the model has recurrent layers. Heads
            that divide over the devices split the cache already.
    """
    if config.num_recurrent_layers:
        raise InvalidArgument("enable_dp_attention", f"is on, but {config.architecture} has recurrent layers")
    if config.value_dim is None:
        raise InvalidArgument(
            "enable_dp_attention", f"is on, but {config.architecture} has no latent cache, which devices would repeat"
        )
    mixture = config.mixture and dataclasses.replace(config.mixture, shared_is_whole=True)
    if mixture is not None and not mixture.is_parallel:
        raise InvalidArgument("enable_dp_attention", "is on, but enable_expert_parallel is off; it must be on")
    return dataclasses.replace(config, mixture=mixture, has_dp_attention=True)


def with_redundant_experts(config: ModelConfig, num_redundant_experts: int, num_parts: int) -> ModelConfig:
    """Return the config with experts that are balanced over the devices, some of them with replicas.

    Raises:
        InvalidArgument: devices do not have whole experts, the physical experts cannot be divided evenly, or the model
            has recurrent layers.
    """
    name, mixture = "eplb_config.num_redundant_experts", config.mixture
    if num_parts == 1:
        raise InvalidArgument("enable_eplb", "is on, but the model is on one device (tensor_parallel_size)")
    if mixture is None or not mixture.is_parallel:
        raise InvalidArgument("enable_eplb", "is on, but enable_expert_parallel is off; it must be on")
    if config.num_recurrent_layers:
        raise InvalidArgument("enable_eplb", f"is on, but {config.architecture} has recurrent layers")
    num_experts = mixture.routing.num_experts
    if (num_experts + num_redundant_experts) % num_parts:
        nearest = -num_experts % num_parts
        raise InvalidArgument(
            name,
            f"{num_redundant_experts}: {num_experts} experts and {num_redundant_experts} redundant ones cannot be "
            f"divided evenly among {num_parts} devices; {nearest} or a multiple of {num_parts} more works",
        )
    mixture = dataclasses.replace(mixture, num_redundant_experts=num_redundant_experts)
    return dataclasses.replace(config, mixture=mixture)


def balance_experts(
    load_lx: np.ndarray,
    num_physical: int,
    num_devices: int,
    current_lp: np.ndarray | None = None,
    *,
    num_groups: int = 1,
    num_nodes: int = 1,
) -> np.ndarray:
    """Return the logical expert of each physical one, int32 `[L, P]`, so that devices have similar loads.

    Follows DeepSeek's EPLB (https://github.com/deepseek-ai/EPLB). If the nodes divide the groups of experts, each node
    first gets whole groups of similar load together: the heaviest group first, to the least loaded node with room. A
    row that may use few groups is then sent to few nodes. All experts of a group stay on its node. Within a node, or
    among all devices otherwise, each further physical expert is a replica of the logical one with the most load per
    replica. Then each replica, the heaviest first, goes to the device with the least load of those with room. Rows are
    assumed to spread evenly over replicas.

    Experts stay on devices that have them as far as possible. A layer whose busiest device would not have at least 2 %
    less load keeps its current experts.

    Args:
        load_lx: load of each of X logical experts in each of L layers, at least 0.
        num_physical: P, at least X, a multiple of the devices; device d has P / n consecutive ones.
        current_lp: the current result; None if there is none.
        num_groups: groups of consecutive experts, which divide X.
        num_nodes: nodes of consecutive devices with fast links; they divide the devices.

    Raises:
        ValueError: the numbers do not fit together.
    """
    load_lx = np.asarray(load_lx, np.float64)
    num_layers, num_experts = load_lx.shape
    if num_physical < num_experts or num_physical % num_devices:
        raise ValueError(
            f"num_physical: {num_physical} is below {num_experts} experts, or no multiple of {num_devices} devices"
        )
    if num_experts % num_groups:
        raise ValueError(f"num_groups: {num_groups} does not divide {num_experts} experts")
    if num_devices % num_nodes:
        raise ValueError(f"num_nodes: {num_nodes} does not divide {num_devices} devices")
    num_nodes = 1 if num_groups % num_nodes else num_nodes
    of_node = num_devices // num_nodes
    found_lp = np.stack([_place_layer(load_x, num_physical, of_node, num_groups, num_nodes) for load_x in load_lx])
    if current_lp is None:
        return found_lp
    before_l = device_loads(load_lx, current_lp, num_devices).max(axis=1)
    after_l = device_loads(load_lx, found_lp, num_devices).max(axis=1)
    for layer in range(num_layers):
        if after_l[layer] < (1 - _LEAST_GAIN) * before_l[layer]:
            nodes = (one.reshape(num_nodes, of_node, -1) for one in (found_lp[layer], current_lp[layer]))
            found_lp[layer] = _keep_nodes(*nodes).reshape(-1)
        else:
            found_lp[layer] = current_lp[layer]
    return found_lp


def _place_layer(
    load_x: np.ndarray, num_physical: int, num_devices: int, num_groups: int, num_nodes: int
) -> np.ndarray:
    """Return the experts of a layer's devices `[P]`, node by node, with this many devices in each node."""
    groups_xg = np.arange(len(load_x)).reshape(num_groups, -1)
    of_nodes = [np.arange(num_groups)]
    if num_nodes > 1:
        of_nodes = list(_pack(np.arange(num_groups), load_x[groups_xg].sum(axis=1), num_nodes))
    placed = []
    for groups in of_nodes:
        experts = np.sort(groups_xg[groups].reshape(-1))
        load, counts = load_x[experts], np.ones(len(experts), np.int64)
        for _ in range(num_physical // num_nodes - len(experts)):
            counts[np.argmax(load / counts)] += 1
        packed = _pack(np.repeat(np.arange(len(experts)), counts), load / counts, num_devices)
        placed.append(experts[packed].reshape(-1))
    return np.concatenate(placed).astype(np.int32)


def device_loads(load_lx: np.ndarray, placement_lp: np.ndarray, num_devices: int) -> np.ndarray:
    """Return the load of each device `[L, n]` if rows spread evenly over the replicas of an expert."""
    num_layers, num_experts = load_lx.shape
    layers = np.arange(num_layers)[:, None]
    counts_lx = np.zeros((num_layers, num_experts), np.int64)
    np.add.at(counts_lx, (layers, placement_lp), 1)
    each_lx = load_lx / np.maximum(counts_lx, 1)
    loads: np.ndarray = each_lx[layers, placement_lp].reshape(num_layers, num_devices, -1).sum(axis=2)
    return loads


def _pack(replicas: np.ndarray, load_x: np.ndarray, num_devices: int) -> np.ndarray:
    """Return the experts of each device `[n, P / n]`: the heaviest first, each to the least loaded device with room."""
    num_own = len(replicas) // num_devices
    order = replicas[np.argsort(-load_x[replicas], kind="stable")]
    loads_n, filled_n = np.zeros(num_devices), np.zeros(num_devices, np.int64)
    packed_np = np.empty((num_devices, num_own), np.int32)
    for expert in order:
        device = int(np.argmin(loads_n))
        packed_np[device, filled_n[device]] = expert
        filled_n[device] += 1
        loads_n[device] += load_x[expert]
        if filled_n[device] == num_own:
            loads_n[device] = np.inf
    return packed_np


def _keep_nodes(new_mnp: np.ndarray, old_mnp: np.ndarray) -> np.ndarray:
    """Return the new experts of each node's devices `[nodes, n, P / n]`, where most of them are already."""
    kept_mnp = np.empty_like(new_mnp)
    for new, old in _pair_by_experts(*(one.reshape(len(one), -1) for one in (new_mnp, old_mnp))):
        kept_mnp[old] = _keep_places(new_mnp[new], old_mnp[old])
    return kept_mnp


def _pair_by_experts(new_np: np.ndarray, old_np: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield pairs of a new and an old set of experts, those with most experts in common first."""
    num_experts = int(max(new_np.max(), old_np.max())) + 1
    has_new, has_old = np.zeros((len(new_np), num_experts)), np.zeros((len(old_np), num_experts))
    for index, (new, old) in enumerate(zip(new_np, old_np, strict=True)):
        has_new[index, new] = has_old[index, old] = 1
    common_nn = has_new @ has_old.T
    for _ in range(len(new_np)):
        new, old = np.unravel_index(int(np.argmax(common_nn)), common_nn.shape)
        common_nn[new, :] = common_nn[:, old] = -1
        yield int(new), int(old)


def _keep_places(new_np: np.ndarray, old_np: np.ndarray) -> np.ndarray:
    """Return the new experts of each device, on the devices and in the places that have most of them already."""
    kept_np = np.empty_like(new_np)
    for new, old in _pair_by_experts(new_np, old_np):
        left, places = new_np[new].tolist(), [-1] * new_np.shape[1]
        for place, expert in enumerate(old_np[old].tolist()):
            if expert in left:
                left.remove(expert)
                places[place] = expert
        kept_np[old] = [expert if expert >= 0 else left.pop() for expert in places]
    return kept_np


def get_sources(old_p: np.ndarray, new_p: np.ndarray, num_devices: int) -> np.ndarray:
    """Return the old physical expert that each new one becomes, int32 `[P]`: itself or one on its device if possible.

    Among others it takes them in turn, so that devices with replicas share the sending.
    """
    num_own = len(old_p) // num_devices
    homes: dict[int, list[int]] = {}
    for place, expert in enumerate(old_p.tolist()):
        homes.setdefault(expert, []).append(place)
    sources = []
    for place, expert in enumerate(new_p.tolist()):
        at_home = [home for home in homes[expert] if home // num_own == place // num_own]
        if place in at_home:
            sources.append(place)
        elif at_home:
            sources.append(at_home[0])
        else:
            homes[expert].append(source := homes[expert].pop(0))
            sources.append(source)
    return np.array(sources, np.int32)


def build_expert_map(placement_lp: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays of an `ExpertMap` for each layer, int32 `[L, X + 1]` and `[L, P]`."""
    physical_lp = np.argsort(placement_lp, axis=1, kind="stable").astype(np.int32)
    bounds = np.arange(num_experts + 1)
    starts = [np.searchsorted(np.sort(placement), bounds).astype(np.int32) for placement in placement_lp]
    return np.stack(starts), physical_lp
