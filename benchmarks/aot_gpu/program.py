"""A lowered program and what has to be true of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax


@dataclass(frozen=True, slots=True)
class Program:
    """A lowered program and what has to be true once it is compiled.

    Attributes:
        lowered: of jax.
        pool_bytes: of the pool that is donated, and so aliased; 0 where none is.
        pool_shape: of the pool, none of which may be copied.
        weight_shapes: of arrays that may not be copied either, their axes in ascending order.
        max_temp_bytes: what it may take beside its arguments and results.
        num_kernels: kernels of ours in it, at least.
        num_writes: operations that may write the pool, each in place: a layer's keys and values, at once.
        has_weights: its larger arguments are weights, none of which any instruction may copy.
        calls: kernels, ours by their names and others by their targets, and how often each has to be called at least.
    """

    lowered: jax.stages.Lowered
    pool_bytes: int
    pool_shape: tuple[int, ...]
    weight_shapes: frozenset[tuple[int, ...]]
    max_temp_bytes: int
    num_kernels: int
    num_writes: int
    has_weights: bool = False
    calls: Mapping[str, int] = field(default_factory=dict)
