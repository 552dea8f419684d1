"""KV groups: layers with the same window share block tables, in groups of one size.

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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
        places: of each layer.
    """

    windows: tuple[int | None, ...]
    num_layers: int
    places: tuple[KVPlace, ...]


def group_layers(windows: Sequence[int | None], max_model_len: int, units: Units | None = None) -> KVGroups:
    """Group the layers of a model.

    Args:
        windows: `AttentionKind.sliding_window` of each layer.
        max_model_len: maximum tokens of a sequence; a window of at least this length counts as none.
        units: every layer once, each with others of the same window; None is each layer alone.
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
