"""The vocabulary as the columns of an array, whole or split over devices, and reductions over all of it.

    device 0           device 1           device 2
    | 0 1 2 3 4 5 |    | 6 7 ...   11 |   | 12 13 14 - - - |      padding comes last and holds minus infinity

Nothing here moves more than a few numbers per row between devices.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Num


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of the columns. Static under jit.

    Attributes:
        size: V, tokens.
        axis: the mesh axis over which the columns are split, inside shard_map; None if they are all here.
    """

    size: int
    axis: str | None = None

    def ids(self, num_columns: int) -> Int[Array, "V"]:
        """Return the token of each local column; padding columns have ids from the size on."""
        return self.first(num_columns) + jnp.arange(num_columns, dtype=jnp.int32)

    def columns(self, ids: Int[Array, "..."], num_columns: int) -> Int[Array, "..."]:
        """Return the local column of each token, the inverse of `ids`; `num_columns` for a token on another device."""
        columns = ids - self.first(num_columns)
        return jnp.where((columns >= 0) & (columns < num_columns), columns, num_columns)

    def without_padding(self, x_rv: Float[Array, "R V"]) -> Float[Array, "R V"]:
        """Return the values with minus infinity in padding columns."""
        if self.axis is None:
            return x_rv
        return jnp.where(self.ids(x_rv.shape[1]) < self.size, x_rv, -jnp.inf)

    def pick(self, x_rv: Float[Array, "R V"], ids_r: Int[Array, "R"]) -> Float[Array, "R 1"]:
        """Return each row's value of one token."""
        return self.pick_some(x_rv, ids_r[:, None])

    def pick_some(self, x_rv: Float[Array, "R V"], ids_rk: Int[Array, "R K"]) -> Float[Array, "R K"]:
        """Return each row's values of some tokens."""
        here_rk = self.pick_here(x_rv, ids_rk, 0)
        return here_rk if self.axis is None else lax.psum(here_rk, self.axis)

    def pick_here(self, x_rv: Float[Array, "R V"], ids_rk: Int[Array, "R K"], missing: float) -> Float[Array, "R K"]:
        """Return each row's values of some tokens, and `missing` for tokens on other devices."""
        columns_rk = self.columns(ids_rk, x_rv.shape[1])
        return jnp.take_along_axis(x_rv, columns_rk, axis=1, mode="fill", fill_value=missing)

    def max(self, x_rv: Float[Array, "R V"]) -> Float[Array, "R 1"]:
        """Return the largest value of each row."""
        here_r1 = x_rv.max(axis=1, keepdims=True)
        return here_r1 if self.axis is None else lax.pmax(here_r1, self.axis)

    def min(self, x_rv: Int[Array, "R V"]) -> Int[Array, "R"]:
        """Return the smallest value of each row."""
        here_r = x_rv.min(axis=1)
        return here_r if self.axis is None else lax.pmin(here_r, self.axis)

    def all_below_infinity(self, x_rv: Float[Array, "R V"]) -> Bool[Array, "R 1"]:
        """Return True for rows with neither NaN nor plus infinity.

        It counts, because the largest of values with NaN is not NaN on every platform.
        """
        return (self.sum(jnp.where(x_rv < jnp.inf, 0.0, 1.0)) == 0)[:, None]

    def sum(self, *parts: Num[Array, "R ..."]) -> Num[Array, "R"]:
        """Return the sum of each row, over all arguments."""
        here_r = functools.reduce(operator.add, (x_rv.sum(axis=1) for x_rv in parts))
        return here_r if self.axis is None else lax.psum(here_r, self.axis)

    def sums(self, *parts: Float[Array, "R V"]) -> Float[Array, "N R"]:
        """Return the sums of each row, for each of N arrays, in one reading of their inputs."""
        if len(parts) == 1:
            return self.sum(*parts)[None]
        zeros = tuple(jnp.zeros((), x_rv.dtype) for x_rv in parts)
        # One reduction of many operands: XLA for GPUs would run separate reductions one after the other.
        here_nr = jnp.stack(lax.reduce(parts, zeros, lambda a, b: tuple(map(operator.add, a, b)), [1]))
        return here_nr if self.axis is None else lax.psum(here_nr, self.axis)

    def log_sum_exp(self, largest_r1: Float[Array, "R 1"], *parts: Float[Array, "R ..."]) -> Float[Array, "R 1"]:
        """Return log(sum(exp(x))) of each row over all arguments, whose largest value is given."""
        return largest_r1 + jnp.log(self.sum(*(jnp.exp(x_rv - largest_r1) for x_rv in parts)))[:, None]

    def top_k(self, x_rv: Float[Array, "R V"], k: int) -> tuple[Float[Array, "R K"], Int[Array, "R K"]]:
        """Return the k largest values of each row in order, and their tokens; of equals the lower token comes first."""
        x_rk, columns_rk = lax.top_k(x_rv, min(k, x_rv.shape[1]))
        if self.axis is None:
            return x_rk, columns_rk
        # The best of each device, in order of tokens among equals: the order in which top_k takes equals.
        ids_rk = columns_rk + self.first(x_rv.shape[1])
        x_rn = lax.all_gather(x_rk, self.axis, axis=1, tiled=True)
        ids_rn = lax.all_gather(ids_rk, self.axis, axis=1, tiled=True)
        x_rk, places_rk = lax.top_k(x_rn, k)
        return x_rk, jnp.take_along_axis(ids_rn, places_rk, axis=1)

    def first(self, num_columns: int) -> Int[Array, ""] | int:
        """Return the token of the first local column."""
        return 0 if self.axis is None else lax.axis_index(self.axis) * num_columns
