"""Which replica takes a request: by cached prefix, then by load, then the first.

    prefix   leading blocks of the prompt that are cached there, or belong to a prompt that is in flight there
    load     of the requests in flight: their rows over max_num_seqs, and their tokens over the pool's slots, added up

A replica whose load is more than HALF_A_REPLICA above the least one's is not asked for its prefix: a prefix that
everybody uses would keep one replica busy and the others idle. The rule is a function of what was cached and is in
flight; nothing is sampled. It decides where a request runs and never what comes of it.
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
"""How much more than the least loaded replica one may have to do and still get requests for its prefix."""
MAX_ROUTED_BLOCKS = 256
"""Blocks of a prompt that decide: a hash takes 3 us, and the caller's thread serves others too."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Where one request went, and what it counts there.

    Attributes:
        replica: its index.
        cost: what it adds to the load, in units of one row's slot: max_num_seqs x the pool's slots is a whole replica.
        keys: of the leading blocks of its prompt.
    """

    replica: int
    cost: int
    keys: tuple[Key, ...]


class Router:
    """Knows what is in flight where. Callers hold a lock of theirs.

    Args:
        sources: the prefixes of the replicas, in order; None where nothing is cached.
        geometry: of each of them.
    """

    def __init__(self, sources: Sequence[Prefixes | None], geometry: Geometry) -> None:
        self._sources = sources
        self._block_size = geometry.block_size
        self._num_rows = geometry.max_num_seqs
        self._num_slots = geometry.num_blocks * geometry.block_size
        self._loads = [0] * len(sources)
        self._routes: dict[str, Route] = {}
        # How many prompts in flight have a block: it is cached as soon as it is computed, and held until they end.
        self._in_flight: list[Counter[Key]] = [Counter() for _ in sources]

    def routes(self, request: Request) -> list[Route]:
        """Every replica, the one to try first in front."""
        keys, cost = self._keys(request), self._cost(request)
        return [Route(replica, cost, keys) for replica in self._ranked(keys)]

    def best(self, keys: Sequence[Key]) -> int:
        """The replica that a prompt with these leading blocks would go to first."""
        return self._ranked(keys[:MAX_ROUTED_BLOCKS])[0]

    def _ranked(self, keys: Sequence[Key]) -> list[int]:
        most = min(self._loads) + HALF_A_REPLICA * self._num_rows * self._num_slots

        def rank(replica: int) -> tuple[int, int, int]:
            load = self._loads[replica]
            return (-self._num_leading(replica, keys) if load <= most else 0, load, replica)

        return sorted(range(len(self._sources)), key=rank)

    def route_of(self, request_id: str) -> Route | None:
        """Where a request is in flight; None when it is not."""
        return self._routes.get(request_id)

    def enter(self, request_id: str, route: Route) -> None:
        """A request is in flight from now on."""
        self._routes[request_id] = route
        self._loads[route.replica] += route.cost
        self._in_flight[route.replica].update(route.keys)

    def leave(self, request_id: str, route: Route) -> None:
        """Notes that a request is no longer in flight; one that was dropped is not counted twice."""
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
        """The keys of the blocks that a replica could have at hand: the last token of a prompt always runs."""
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
