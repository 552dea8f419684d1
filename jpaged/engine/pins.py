"""Prefixes that stay in the pool by name, whatever the load: computed by an ordinary request, kept when it ends.

    pin_prefix("system", ids)    a request of one token runs; its full blocks are pinned when it ends
    unpin_prefix("system")       they are cached like any others again

Names are given and taken by callers' threads, blocks by the engine's: a name is taken before its prefix is computed.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterable

from jpaged.engine.executor import Geometry
from jpaged.engine.paged_memory import PagedMemory
from jpaged.engine.reserved_memory import ReservedMemory
from jpaged.engine.sequence import Group
from jpaged.errors import AlreadyExists, InvalidArgument, Unsupported
from jpaged.types import Request, SamplingParams


class PinnedPrefixes:
    """Whose prefix is pinned or being computed. `request`, `give_up` and `take` may be called from any thread."""

    def __init__(self, memory: PagedMemory | ReservedMemory, geometry: Geometry) -> None:
        self._memory = memory
        self._geometry = geometry
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._computing: set[str] = set()
        self._pinned: set[str] = set()

    def request(self, name: str, token_ids: tuple[int, ...], salt: str) -> Request:
        """Takes the name, and makes the request that computes the prefix.

        Raises:
            Unsupported: nothing is cached by prefix here.
            InvalidArgument: the prefix fills no block, is too long, or the pool has no room to keep it.
            AlreadyExists: the name is taken.
        """
        self._check(token_ids)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, cache_salt=salt)
        with self._lock:
            if name in self._computing or name in self._pinned:
                raise AlreadyExists(f"prefix {name!r} is pinned; unpin it, or choose another name")
            self._computing.add(name)
        return self.renamed(name, Request("", token_ids, sampling))

    def renamed(self, name: str, request: Request) -> Request:
        """The request for a prefix under an id that is new; for when it has to run again, too."""
        return dataclasses.replace(request, request_id=f"pin_prefix/{name}/{next(self._numbers)}")

    def give_up(self, name: str) -> None:
        """The prefix of this name was not computed after all."""
        with self._lock:
            self._computing.discard(name)

    def keep(self, name: str, group: Group, others: Iterable[Group]) -> int:
        """Pins what the request has computed; on the engine's thread, before the request gives its blocks back.

        Args:
            others: requests in flight, each of which must still find its blocks when it runs alone.

        Returns:
            the number of tokens that are pinned.

        Raises:
            InvalidArgument: too few blocks would be left.
        """
        assert isinstance(self._memory, PagedMemory)
        num_tokens = self._memory.pin(name, group.live[0])
        try:
            self._check_room_left(self._memory, self._memory.num_pinned_blocks, others)
        except InvalidArgument:
            self._memory.unpin(name)
            raise
        with self._lock:
            self._computing.discard(name)
            self._pinned.add(name)
        return num_tokens

    def take(self, name: str) -> bool:
        """Frees a name, for `release` to follow on the engine's thread; False when nothing is pinned under it."""
        with self._lock:
            is_pinned = name in self._pinned
            self._pinned.discard(name)
        return is_pinned

    def release(self, name: str) -> None:
        """Lets the blocks be evicted again."""
        assert isinstance(self._memory, PagedMemory)
        self._memory.unpin(name)

    def _check(self, token_ids: tuple[int, ...]) -> None:
        if not isinstance(self._memory, PagedMemory) or not self._memory.can_cache:
            raise Unsupported("a prefix cannot be pinned: the prefix cache is off (enable_prefix_caching, kv_policy)")
        geometry, count = self._geometry, len(token_ids)
        for token_id in token_ids:
            if not isinstance(token_id, int) or not 0 <= token_id < geometry.vocab_size:
                raise InvalidArgument(
                    "token_ids", f"{token_id!r} is not a token id from 0 to {geometry.vocab_size - 1}"
                )
        if count >= geometry.max_model_len:
            raise InvalidArgument("token_ids", f"{count} tokens are not below max_model_len ({geometry.max_model_len})")
        num_blocks = self._memory.num_cacheable_blocks(count)
        if num_blocks == 0:
            cause = f"fill no block of {geometry.block_size}"
            if count >= geometry.block_size:
                cause = f"are over max_cached_tokens ({self._memory.max_cached_tokens})"
            raise InvalidArgument("token_ids", f"{count} tokens {cause}: there is nothing to pin")
        self._check_room_left(self._memory, num_blocks, ())

    def _check_room_left(self, memory: PagedMemory, num_pinned: int, others: Iterable[Group]) -> None:
        geometry = self._geometry
        num_left = geometry.num_blocks - num_pinned
        needs = [(geometry.max_blocks_per_seq, f"a request of max_model_len ({geometry.max_model_len})")]
        needs += [(memory.num_blocks_alone(group), f"request {group.request.request_id!r}") for group in others]
        needed, who = max(needs)
        if num_left < needed:
            raise InvalidArgument(
                "token_ids",
                f"{num_pinned} pinned blocks would leave {num_left} of {geometry.num_blocks}; {who} may need {needed}",
            )
