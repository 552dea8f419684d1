"""Replica selection: by cached prefix, then by load, then by index.

    prefix   leading blocks of the prompt that are cached there, or belong to a prompt that is in flight there
    load     of the requests in flight: their rows over max_num_seqs, and their tokens over the pool's slots, added up

The prefix counts only for replicas whose load is at most HALF_A_REPLICA above the least: otherwise a prefix that all
requests share would keep one replica busy and the others idle. The rule is a deterministic function of what is cached
and in flight. It affects where a request runs, never its results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jpaged.engine.executor import Geometry
from jpaged.engine.kv.blocks import Key, block_key, root_key
from jpaged.engine.kv.prefixes import Prefixes
from jpaged.types import Request

HALF_A_REPLICA = 0.5
"""Load above the least loaded replica, in replicas, up to which prefix affinity counts."""
MAX_ROUTED_BLOCKS = 256
"""Leading blocks of a prompt that are compared: a hash takes 3 us on the caller's thread, which others need."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """The replica of one request, and its share of the load.

    Attributes:
        replica: index.
        cost: load in units of one row's slot: max_num_seqs x the pool's slots is a whole replica.
        keys: block hashes of the prompt's leading blocks.
    """

    replica: int
    cost: int
    keys: tuple[Key, ...]


class Router:
    """Tracks the requests in flight on each replica. Callers hold a lock.

    Args:
        sources: the prefix caches of the replicas, in order; None without a prefix cache.
        geometry: geometry of each replica.
    """

    def __init__(self, sources: Sequence[Prefixes | None], geometry: Geometry) -> None:
        self._sources = sources
        self._block_size = geometry.block_size
        self._num_rows = geometry.max_num_seqs
        self._num_slots = geometry.num_blocks * geometry.block_size
        self._loads = [0] * len(sources)
        self._routes: dict[str, Route] = {}
        # Number of prompts in flight per block: it is cached once computed, and stays until they end.
        self._in_flight: list[Counter[Key]] = [Counter() for _ in sources]

    def routes(self, request: Request) -> list[Route]:
        """Return a route for every replica, best first."""
        keys, cost = self._keys(request), self._cost(request)
        return [Route(replica, cost, keys) for replica in self._ranked(keys)]

    def best(self, keys: Sequence[Key]) -> int:
        """Return the replica that a prompt with these leading blocks would be sent to first."""
        return self._ranked(keys[:MAX_ROUTED_BLOCKS])[0]

    def _ranked(self, keys: Sequence[Key]) -> list[int]:
        most = min(self._loads) + HALF_A_REPLICA * self._num_rows * self._num_slots

        def rank(replica: int) -> tuple[int, int, int]:
            load = self._loads[replica]
            return (-self._num_leading(replica, keys) if load <= most else 0, load, replica)

        return sorted(range(len(self._sources)), key=rank)

    def route_of(self, request_id: str) -> Route | None:
        """Return the route of a request in flight, or None."""
        return self._routes.get(request_id)

    def enter(self, request_id: str, route: Route) -> None:
        """Record a request as in flight."""
        self._routes[request_id] = route
        self._loads[route.replica] += route.cost
        self._in_flight[route.replica].update(route.keys)

    def leave(self, request_id: str, route: Route) -> None:
        """Remove a request that is no longer in flight; no-op if it was dropped before."""
        if self._routes.get(request_id) is not route:
            return
        del self._routes[request_id]
        self._loads[route.replica] -= route.cost
        counts = self._in_flight[route.replica]
        for key in route.keys:
            counts[key] -= 1
            if not counts[key]:
                del counts[key]

    def _num_leading(self, replica: int, keys: Sequence[Key]) -> int:
        source, in_flight = self._sources[replica], self._in_flight[replica]
        for count, key in enumerate(keys):
            if key not in in_flight and (source is None or not source.has_prefix(key)):
                return count
        return len(keys)

    def _keys(self, request: Request) -> tuple[Key, ...]:
        """Return the hashes of the blocks that a replica could have cached.

        The last token of a prompt always runs, so its block does not count.
        """
        if not request.sampling.use_prefix_cache:
            return ()
        token_ids, size = request.prompt_token_ids, self._block_size
        source = self._sources[0]
        num_cacheable = 0 if source is None else source.num_cacheable_blocks(len(token_ids))
        num_blocks = min(num_cacheable, (len(token_ids) - 1) // size, MAX_ROUTED_BLOCKS)
        keys, parent = [], root_key(request.sampling.cache_salt, request.cache_tenant, request.adapter_digest)
        for i in range(num_blocks):
            parent = block_key(parent, token_ids[i * size : (i + 1) * size])
            keys.append(parent)
        return tuple(keys)

    def _cost(self, request: Request) -> int:
        sampling = request.sampling
        num_rows = sampling.beam_width or sampling.num_samples
        num_tokens = len(request.prompt_token_ids) + num_rows * sampling.max_tokens
        return num_rows * self._num_slots + num_tokens * self._num_rows
