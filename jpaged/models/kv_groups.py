"""Which layers share block tables: those that see equally far, in groups of one size.

    layers    w w w g w w w g w w      w sees a window, g everything

    group 0   g g          sees everything          a block of the pool holds B tokens of the Lg = 2 layers of ONE
    group 1   w w          a window                 group, and a sequence has a block table for each group
    group 2   w w          a window
    group 3   w w          a window
    group 4   w w          a window

A sequence of T tokens holds T tokens of a group that sees everything, and no more than the window of any other. Small
groups waste no places, but each has tables and work on the host, so the fewest groups are taken whose tokens cost
nearly as little as those of groups of one layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

KVPlace = tuple[int, int]
"""Where a layer keeps its keys and values: its group, and which layer of that group it is."""

Units = Sequence[Sequence[int]]
"""Layers that have to be in one group, next to each other: those at one place of a period that is scanned."""

_MOST_OVER_LEAST = 1.05


@dataclass(frozen=True, slots=True)
class KVGroups:
    """Groups of layers; one for a model whose layers all see equally far.

    Attributes:
        windows: tokens that the queries of each group see, themselves included; None is everything. Groups without a
            window come first.
        num_layers: of the largest group (Lg): the layers of a block.
        places: of each layer.
    """

    windows: tuple[int | None, ...]
    num_layers: int
    places: tuple[KVPlace, ...]


def group_layers(windows: Sequence[int | None], max_model_len: int, units: Units | None = None) -> KVGroups:
    """Groups the layers of a model.

    Args:
        windows: of each layer, as `AttentionKind.sliding_window` says.
        max_model_len: tokens of a sequence at most; a window that holds so many is none.
        units: every layer once, each with others of its window; None is each layer alone.
    """
    units = [[layer] for layer in range(len(windows))] if units is None else units
    seen: dict[int | None, list[Sequence[int]]] = {}
    for unit in sorted(units, key=lambda unit: (-len(unit), unit[0])):
        window = windows[unit[0]]
        seen.setdefault(None if window is None or window >= max_model_len else window, []).append(unit)
    kinds = sorted(seen.items(), key=lambda item: (item[0] is not None, -(item[0] or 0)))

    def bins(num_layers: int) -> list[tuple[int | None, list[Sequence[int]]]]:
        return [(window, packed) for window, units in kinds for packed in _pack(units, num_layers)]

    def num_tokens(num_layers: int) -> int:
        return num_layers * sum(max_model_len if window is None else window for window, _ in bins(num_layers))

    largest = max(len(unit) for unit in units)
    sizes = range(largest, max(largest, *(_num_layers(units) for _, units in kinds)) + 1)
    limit = _MOST_OVER_LEAST * min(map(num_tokens, sizes))
    chosen = min((size for size in sizes if num_tokens(size) <= limit), key=lambda size: (len(bins(size)), size))
    groups = bins(chosen)
    places = {
        layer: (group, place)
        for group, (_, packed) in enumerate(groups)
        for place, layer in enumerate(layer for unit in sorted(packed, key=min) for layer in unit)
    }
    return KVGroups(tuple(window for window, _ in groups), chosen, tuple(places[i] for i in range(len(windows))))


def _pack(units: Iterable[Sequence[int]], num_layers: int) -> list[list[Sequence[int]]]:
    """Units in groups of at most so many layers: each, the largest first, into the first group with room for it."""
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
