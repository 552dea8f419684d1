"""Cost model of cascade attention: reading a shared prefix once for several rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CascadeCosts:
    """Costs and gains of reading a shared prefix once for several rows, in a second pass of attention.

    The unit is the cost of reading one token of context for one query, by a decoding row: its keys and values in all
    layers at the device's memory bandwidth. Queries that read a prefix together do so in tiles,

        tile(q) = 1 for one query, else ceil(q / w) * (tile_tokens + query_share * w)     w = min(tile_queries, T)
        gain    = sum of tile(queries of a row) * n - tile(queries of all rows) * n - queries * query_tokens

    for n shared tokens. If memory bandwidth is the only cost, tile(q) is 1 and the gain is the bytes that are not read
    again, (rows - 1) * n, less the cost of the outputs of two passes. All runs of a step together have to gain more
    than step_tokens.

    Attributes:
        granule_tokens: prefixes are shared in multiples of it. It is a multiple of the block size: the tokens that a
            kernel reads at a time, so that neither pass reads tokens that it does not use.
        tile_queries: maximum number of queries in a tile.
        tile_tokens: fixed cost of a tile for each token.
        query_share: additional cost of each place of a tile, used by a query or not.
        query_tokens: cost of writing, reading and merging the two outputs of a query.
        step_tokens: cost of starting the second pass in every layer.
        windows: (sliding window, share of the layers that have it); all other layers have full attention.
    """

    granule_tokens: int
    tile_queries: int
    tile_tokens: float
    query_share: float
    query_tokens: float
    step_tokens: float
    windows: tuple[tuple[int, float], ...] = ()

    def seen_tokens(self, num_tokens: int, end: int) -> float:
        """Return how many tokens of a prefix all queries of a run see, averaged over the layers.

        `end` is one past the position of the last query.
        """
        if not self.windows:
            return num_tokens
        share = 1.0 - sum(share for _, share in self.windows)
        seen = [share * max(0, num_tokens - max(0, end - window)) for window, share in self.windows]
        return share * num_tokens + sum(seen)

    def tile_cost(self, num_queries: int, width: int) -> float:
        """Return tile(q): the cost of a token that several queries read together, in tiles of `width` queries."""
        if num_queries == 1:
            return 1.0
        return -(-num_queries // width) * (self.tile_tokens + self.query_share * width)
