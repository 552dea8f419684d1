"""Kinds of layers of a stack, and the stretches of a stack in which kinds repeat.

    Gemma 3, 62 layers     w w w w w g  w w w w w g  ...  w w w w w g   |  w w
                           └ a period ┘ repeated 10 times, six stacks   |  repeated twice, one stack

Layers at the same place of a period are stacked in one array, so that a scan runs a period at a time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from jpaged.kernels.attention_kind import AttentionKind

_MAX_PERIOD = 8


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A kind of layer: hashable, static under jit. Layers of one kind have parameters of the same shapes.

    Attributes:
        attention: the attention kind.
        rope: index of the model's rotary embedding for queries and keys; None is none.
        is_sparse: a mixture of experts replaces the dense feed-forward.
    """

    attention: AttentionKind
    rope: int | None = 0
    is_sparse: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
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
def segments_of(kinds: tuple[LayerKind, ...]) -> tuple[Segment, ...]:
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
    found: list[Segment] = []
    first = first_stack = 0
    while first < num_layers:
        _, _, period, repeats = best[first]
        found.append(Segment(first, kinds[first : first + period], repeats, first_stack))
        first, first_stack = first + period * repeats, first_stack + period
    return tuple(found)


def stacks_of(kinds: tuple[LayerKind, ...]) -> dict[str, range]:
    """Return the layers of each stack, by its name."""
    return {
        segment.stack_at(place): segment.layers_at(place)
        for segment in segments_of(kinds)
        for place in range(len(segment.kinds))
    }
