"""What reading a prefix once for several rows costs, and what it gains."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CascadeCosts:
    """What it costs to read a prefix once for several rows, in a second pass of attention.

    The unit is a token of context read for one query alone, by a row that decodes: its keys and values in all layers,
    so many bytes at the rate of the device. Queries that go over a prefix together do so in tiles,

        tile(q) = 1 for one query, else ceil(q / w) * (tile_tokens + query_share * w)     w = min(tile_queries, T)
        gain    = sum of tile(queries of a row) * n - tile(queries of all rows) * n - queries * query_tokens

    for n tokens that rows have in common. With tile(q) = 1, as where memory is all that counts, this is the bytes that
    are not read again, (rows - 1) * n, less what the outputs of two passes cost. A step has to gain more than
    step_tokens by all its runs.

    Attributes:
        granule_tokens: prefixes are shared in multiples of it, which is a multiple of the block size: the tokens that
            a kernel reads at a time, so that neither pass reads a part of them in vain.
        tile_queries: queries of a tile at most.
        tile_tokens: a tile's cost for each token, besides what its queries add.
        query_share: what each place of a tile adds, whether or not a query is in it.
        query_tokens: writing, reading and merging the two outputs of a query.
        step_tokens: starting the second pass in every layer.
        windows: (sliding window, share of the layers that have it); all others see everything.
    """

    granule_tokens: int
    tile_queries: int
    tile_tokens: float
    query_share: float
    query_tokens: float
    step_tokens: float
    windows: tuple[tuple[int, float], ...] = ()

    def seen_tokens(self, num_tokens: int, end: int) -> float:
        """How much of a prefix all queries of a run see, over the layers; `end`: behind the last one's position."""
        if not self.windows:
            return num_tokens
        share = 1.0 - sum(share for _, share in self.windows)
        seen = [share * max(0, num_tokens - max(0, end - window)) for window, share in self.windows]
        return share * num_tokens + sum(seen)

    def tile_cost(self, num_queries: int, width: int) -> float:
        """tile(q): what a token costs that so many queries read together, in tiles of a width."""
        if num_queries == 1:
            return 1.0
        return -(-num_queries // width) * (self.tile_tokens + self.query_share * width)
