"""Kinds of layers of a stack, the stretches in which kinds repeat, and the groups of layers that share block tables.

    Gemma 3, 62 layers     w w w w w g  w w w w w g  ...  w w w w w g   |  w w
                           └ a period ┘ repeated 10 times, six stacks   |  repeated twice, one stack

Layers at the same place of a period are stacked in one array, so that a scan runs a period at a time.

Layers with the same window share block tables, in KV groups of one size:

    layers    w w w g w w w g w w      w sees a window, g everything

    group 0   g g          sees everything          a block of the pool holds B tokens of the Lg = 2 layers of ONE
    group 1   w w          a window                 group, and a sequence has a block table for each group
    group 2   w w          a window
    group 3   w w          a window
    group 4   w w          a window

A sequence of T tokens holds T tokens of a group that sees everything, and no more than the window of any other. Small
groups leave no layer of a block unused, but each has tables and work on the host. So the fewest groups are taken whose
tokens cost nearly as little as those of groups of one layer.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jpaged.kernels.attention_kind import AttentionKind

_MAX_PERIOD = 8


@dataclass(frozen=True, slots=True)
class StateArray:
    """An array of fixed size that a recurrent layer keeps for each sequence, in place of keys and values.

    Attributes:
        shape: of one sequence in one layer; devices split the first axis.
        dtype: float32, for example; None is the model's type.
    """

    shape: tuple[int, ...]
    dtype: str | None = None

    def num_bytes(self, model_dtype: np.dtype) -> int:
        """Return the bytes of the array."""
        return math.prod(self.shape) * self.get_dtype(model_dtype).itemsize

    def get_dtype(self, model_dtype: np.dtype) -> np.dtype:
        """Return the type of the numbers."""
        return model_dtype if self.dtype is None else np.dtype(self.dtype)


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Key/value heads of layers whose sizes differ from those of the KV pool.

        pool    K = 2 heads of D = 8     [k0 k0 k0 k0 k0 k0 k0 k0] [k1 k1 k1 k1 k1 k1 k1 k1]     one layer
        layer   4 heads of 4             [a0 a0 a0 a0  0  0  0  0] [b0 b0 b0 b0  0  0  0  0]     in a KV group
                                         [a1 a1 a1 a1  0  0  0  0] [b1 b1 b1 b1  0  0  0  0]     in the next group

    Attributes:
        num_kv_heads: a multiple of the pool's.
        head_dim: at most the pool's; each head is padded with zeros.
        num_places: layers of the pool that the heads take, in consecutive KV groups.
    """

    num_kv_heads: int
    head_dim: int
    num_places: int = 1


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A kind of layer: hashable, static under jit. Layers of one kind have parameters of the same shapes.

    Attributes:
        attention: the attention kind; a recurrent layer has that of other layers, without effect.
        rope: index of the model's rotary embedding for queries and keys; None is none.
        is_sparse: a mixture of experts replaces the dense feed-forward.
        has_feed_forward: there is a feed-forward, or a mixture, after attention.
        states: of a recurrent layer, which replaces attention; empty for attention.
        has_norm: the input of attention is normalized, if the model's layers have norms there.
        heads: sizes of the key/value heads; None has those of the model, and of the KV pool.
        kv_source: number of the layer whose keys and values this one attends to; it computes none. None is itself.
        inner: width of the dense feed-forward; None is that of the model.
        sparsity: share of the gates of the dense feed-forward that a cutoff sets to zero.
    """

    attention: AttentionKind
    rope: int | None = 0
    is_sparse: bool = False
    states: tuple[StateArray, ...] = ()
    has_feed_forward: bool = True
    has_norm: bool = True
    heads: HeadSizes | None = None
    kv_source: int | None = None
    inner: int | None = None
    sparsity: float = 0.0

    @property
    def num_places(self) -> int:
        """Layers of the KV pool that the layer has for its own keys and values."""
        if self.states or self.kv_source is not None:
            return 0
        return 1 if self.heads is None else self.heads.num_places

    def blank_states(self, model_dtype: np.dtype) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Return the shape and the type of each array of a sequence's state."""
        return [(one.shape, one.get_dtype(model_dtype)) for one in self.states]


@dataclass(frozen=True, slots=True)
class LayerSegment:
    """A stretch of layers in which a period of kinds repeats.

    Attributes:
        first: the number of the first layer.
        kinds: of one period.
        num_repeats: periods.
        first_stack: the number of the first stack; there is one for each place of the period.
    """

    first: int
    kinds: tuple[LayerKind, ...]
    num_repeats: int
    first_stack: int

    @property
    def end(self) -> int:
        """Number of the layer after its last one."""
        return self.first + len(self.kinds) * self.num_repeats

    def layers_at(self, place: int) -> range:
        """Return the layers at one place of the period."""
        return range(self.first + place, self.end, len(self.kinds))

    def stack_at(self, place: int) -> str:
        """Return the name of the stack with the layers at one place of the period."""
        return str(self.first_stack + place)


@functools.lru_cache(maxsize=64)
def build_segments(kinds: tuple[LayerKind, ...]) -> tuple[LayerSegment, ...]:
    """Return the segments of a stack, with the fewest stacks possible: one layer is compiled for each stack."""
    num_layers, most = len(kinds), min(_MAX_PERIOD, len(kinds))
    # runs[p][i]: number of consecutive layers from i on that equal the layer p later.
    runs = [[0] * (num_layers + 1) for _ in range(most + 1)]
    for period in range(1, most + 1):
        for i in range(num_layers - period - 1, -1, -1):
            runs[period][i] = runs[period][i + 1] + 1 if kinds[i] == kinds[i + period] else 0
    best: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)] * (num_layers + 1)  # stacks, segments, period, repeats
    for i in range(num_layers - 1, -1, -1):
        choices = []
        for period in range(1, min(most, num_layers - i) + 1):
            repeats = 1 + runs[period][i] // period
            stacks, segments, _, _ = best[i + period * repeats]
            choices.append((stacks + period, segments + 1, period, repeats))
        best[i] = min(choices)
    found: list[LayerSegment] = []
    first = first_stack = 0
    while first < num_layers:
        _, _, period, repeats = best[first]
        found.append(LayerSegment(first, kinds[first : first + period], repeats, first_stack))
        first, first_stack = first + period * repeats, first_stack + period
    return tuple(found)


def get_stacks(kinds: tuple[LayerKind, ...]) -> dict[str, range]:
    """Return the layers of each stack, by its name."""
    return {
        segment.stack_at(place): segment.layers_at(place)
        for segment in build_segments(kinds)
        for place in range(len(segment.kinds))
    }


def divides_into_stages(kinds: tuple[LayerKind, ...], num_stages: int) -> bool:
    """Return True if equal parts of the layers, in order, have equal parts of every stack."""
    num_layers = len(kinds) // num_stages
    if kinds[:num_layers] * num_stages != kinds:
        return False
    stacks, own = get_stacks(kinds), get_stacks(kinds[:num_layers])
    return {name: len(layers) for name, layers in stacks.items()} == {
        name: len(layers) * num_stages for name, layers in own.items()
    }


KVPlace = tuple[int, int]
"""Place of a layer's keys and values: its group, and its index in that group."""

Units = Sequence[Sequence[int]]
"""Layers that must be adjacent in one group: those at one place of a period that is scanned."""

_MOST_OVER_LEAST = 1.05


@dataclass(frozen=True, slots=True)
class KVGroups:
    """Groups of layers; one for a model whose layers all have the same window.

    Attributes:
        windows: tokens that the queries of each group see, including themselves; None is everything. Groups without a
            window come first.
        num_layers: of the largest group (Lg): the layers of a block.
        places: of each layer; see `group_kinds` for recurrent ones, and those with several places.
    """

    windows: tuple[int | None, ...]
    num_layers: int
    places: tuple[KVPlace, ...]


def get_states(kinds: Iterable[LayerKind]) -> tuple[int, tuple[StateArray, ...]]:
    """Return the number of recurrent layers, and the state of each of them; (0, ()) without any."""
    found = [kind.states for kind in kinds if kind.states]
    return len(found), found[0] if found else ()


def count_state_bytes(kinds: Iterable[LayerKind], model_dtype: np.dtype) -> int:
    """Return the bytes of the recurrent state of a sequence, in all layers."""
    num_layers, states = get_states(kinds)
    return num_layers * sum(one.num_bytes(model_dtype) for one in states)


def group_kinds(kinds: Sequence[LayerKind], max_model_len: int, units: Units | None = None) -> KVGroups:
    """Group the layers of a model as `group_layers`.

    Recurrent layers have no keys and are in no group; their places have their indices among the recurrent layers. The
    place of a layer that attends to another one's keys is that of the other layer. A layer with several places has the
    same index in consecutive groups, and its place names the first.
    """
    if all(kind.num_places == 1 for kind in kinds):
        return group_layers([kind.attention.sliding_window for kind in kinds], max_model_len, units)
    storing = [layer for layer, kind in enumerate(kinds) if kind.num_places]
    if not storing:  # the only group has a layer that no layer reads
        return KVGroups((None,), 1, tuple((0, number) for number in range(len(kinds))))
    index = {layer: number for number, layer in enumerate(storing)}
    units = [(layer,) for layer in storing] if units is None else [unit for unit in units if unit[0] in index]
    groups = _group_layers(
        tuple(kinds[layer].attention.sliding_window for layer in storing),
        max_model_len,
        tuple(tuple(index[layer] for layer in unit) for unit in units),
        tuple(kinds[layer].num_places for layer in storing),
    )
    num_before = itertools.accumulate((bool(kind.states) for kind in kinds), initial=0)
    places = tuple(
        (0, number) if kind.states else groups.places[index[layer if kind.kv_source is None else kind.kv_source]]
        for layer, (kind, number) in enumerate(zip(kinds, num_before, strict=False))
    )
    return dataclasses.replace(groups, places=places)


def share_one_layer(kinds: Sequence[LayerKind]) -> KVGroups:
    """Return one group with one layer in which all layers take turns: an encoder's keys are read within their layer."""
    return KVGroups((None,), 1, ((0, 0),) * len(kinds))


def group_layers(windows: Sequence[int | None], max_model_len: int, units: Units | None = None) -> KVGroups:
    """Group the layers of a model.

    Args:
        windows: `AttentionKind.sliding_window` of each layer.
        max_model_len: maximum tokens of a sequence; a window of at least this length counts as none.
        units: every layer once, each with others of the same window; None is each layer alone.
    """
    units = [(layer,) for layer in range(len(windows))] if units is None else [tuple(unit) for unit in units]
    return _group_layers(tuple(windows), max_model_len, tuple(units), (1,) * len(windows))


@functools.lru_cache(maxsize=16)  # the search takes a tenth of a second for 100 layers
def _group_layers(
    windows: tuple[int | None, ...],
    max_model_len: int,
    units: tuple[tuple[int, ...], ...],
    num_places: tuple[int, ...],
) -> KVGroups:
    """Group layers. `num_places` is the number of consecutive groups that a layer is in."""
    seen: dict[tuple[int | None, int], list[Sequence[int]]] = {}
    for unit in sorted(units, key=lambda unit: (-len(unit), unit[0])):
        window = windows[unit[0]]
        window = None if window is None or window >= max_model_len else window
        seen.setdefault((window, num_places[unit[0]]), []).append(unit)
    kinds = sorted(seen.items(), key=lambda item: (item[0][0] is not None, -(item[0][0] or 0), item[0][1]))

    def bins(num_layers: int) -> list[tuple[int | None, list[Sequence[int]]]]:
        return [
            (window, packed)
            for (window, count), units in kinds
            for packed in _pack(units, num_layers)
            for _ in range(count)
        ]

    def num_tokens(num_layers: int) -> int:
        return num_layers * sum(max_model_len if window is None else window for window, _ in bins(num_layers))

    largest = max(len(unit) for unit in units)
    sizes = range(largest, max(largest, *(_num_layers(units) for _, units in kinds)) + 1)
    limit = _MOST_OVER_LEAST * min(map(num_tokens, sizes))
    chosen = min((size for size in sizes if num_tokens(size) <= limit), key=lambda size: (len(bins(size)), size))
    groups = bins(chosen)
    places = {
        layer: (group, place)
        for group, (_, packed) in reversed([*enumerate(groups)])  # the first of several groups with the same layers
        for place, layer in enumerate(layer for unit in sorted(packed, key=min) for layer in unit)
    }
    return KVGroups(tuple(window for window, _ in groups), chosen, tuple(places[i] for i in range(len(windows))))


def _pack(units: Iterable[Sequence[int]], num_layers: int) -> list[list[Sequence[int]]]:
    """Pack units into groups of at most `num_layers` layers: first fit, with the largest units first."""
    groups: list[list[Sequence[int]]] = []
    for unit in units:
        fitting = (group for group in groups if _num_layers(group) + len(unit) <= num_layers)
        group = next(fitting, None)
        if group is None:
            groups.append([unit])
        else:
            group.append(unit)
    return groups


def _num_layers(units: Iterable[Sequence[int]]) -> int:
    return sum(len(unit) for unit in units)
