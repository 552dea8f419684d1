"""Named prefixes that stay in the pool: computed by an ordinary request, and pinned when it finishes.

    pin_prefix("system", ids)    a request of one token runs; its full blocks are pinned when it finishes
    unpin_prefix("system")       they become ordinary cached blocks again

Callers' threads manage names; the engine thread manages blocks. A name is claimed and its blocks are counted before the
prefix is computed. All blocks of all pins together stay within a limit, so that requests keep the rest.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from jpaged.engine.executor import Geometry
from jpaged.engine.kv_cache.prefix_cache import PrefixCacheManager
from jpaged.engine.sequence import OutputCallback, SequenceGroup
from jpaged.errors import AlreadyExists, Cancelled, InvalidArgument, JpagedError, Unsupported
from jpaged.types import FinishReason, LoadedAdapter, OutputEvent, Request, SamplingParams

Pin = tuple[str, str]
"""Tenant and name of a prefix."""


def pin_limit(max_pinned_blocks: int | None, geometry: Geometry) -> int:
    """Return the limit of pinned blocks: the option, or a quarter of the pool that still fits the longest request.

    With data-parallel attention, all pinned blocks may be on one device, where the longest request must fit as well.

    Raises:
        InvalidArgument: the option leaves too few blocks for a request of max_model_len.
    """
    most = max(0, geometry.num_blocks_of_rank - geometry.num_blocks_of_longest)
    if max_pinned_blocks is None:
        return min(geometry.num_blocks // 4, most)
    if max_pinned_blocks > most:
        of_device = " of a device" if geometry.dp_size > 1 else ""
        raise InvalidArgument(
            "max_pinned_blocks",
            f"{max_pinned_blocks} is over {most}: a request of max_model_len ({geometry.max_model_len}) may need "
            f"{geometry.num_blocks_of_longest} of {geometry.num_blocks_of_rank} blocks{of_device}",
        )
    return max_pinned_blocks


class PinnedPrefixes:
    """Pinned prefixes, each computed by an internal request. Any thread may pin and unpin.

    Args:
        prefixes: prefix cache; None if pinning is unsupported.
        limit: returns the number of blocks that requests and pins may use; called on the engine thread.
        max_blocks: result of `pin_limit`.
        submit: submits a request, whose events arrive on the engine thread.
        ask: posts a callable to the engine thread.
        groups: groups in flight by request id; read on the engine thread.
    """

    def __init__(
        self,
        prefixes: PrefixCacheManager | None,
        geometry: Geometry,
        max_blocks: int,
        *,
        submit: Callable[[Request, OutputCallback], None],
        ask: Callable[[Callable[[], None]], None],
        groups: Mapping[str, SequenceGroup],
        limit: Callable[[], int],
    ) -> None:
        self._prefixes = prefixes
        self._geometry = geometry
        self._max_blocks = max_blocks
        self._submit = submit
        self._ask = ask
        self._groups = groups
        self._limit = limit
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._num_blocks: dict[Pin, int] = {}
        self._pinned: set[Pin] = set()

    def pin(self, pin: Pin, token_ids: tuple[int, ...], salt: str, adapter: LoadedAdapter | None = None) -> Future[int]:
        """Start to compute a prefix; see `Engine.pin_prefix`."""
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # a running future cannot be cancelled, so its result can always be set
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, cache_salt=salt)
        try:
            self._claim(pin, self._check(token_ids))
        except JpagedError as error:
            future.set_exception(error)
        else:
            request = Request("", token_ids, sampling, tenant=pin[0], cache_tenant=pin[0], adapter=adapter)
            self._compute(pin, request, future)
        return future

    def unpin(self, pin: Pin) -> bool:
        """Release a name and post the release of the blocks to the engine thread; return False if it is not pinned."""
        with self._lock:
            is_pinned = pin in self._pinned
            if is_pinned:
                self._pinned.discard(pin)
                del self._num_blocks[pin]
        if is_pinned and (prefixes := self._prefixes) is not None:
            self._ask(lambda: prefixes.unpin(pin))
        return is_pinned

    def clear(self) -> None:
        """Release all names and their blocks, also those whose release is posted; on the engine thread."""
        with self._lock:
            for pin in self._pinned:
                del self._num_blocks[pin]
            self._pinned.clear()
        if self._prefixes is not None:
            self._prefixes.unpin_all()

    def _claim(self, pin: Pin, num_blocks: int) -> None:
        """Claim the name and count its blocks."""
        with self._lock:
            if pin in self._num_blocks:
                raise AlreadyExists(f"prefix {pin[1]!r} is pinned; unpin it, or choose another name")
            num_pinned = sum(self._num_blocks.values())
            if num_pinned + num_blocks > self._max_blocks:
                raise InvalidArgument(
                    "token_ids",
                    f"{num_blocks} blocks, added to {num_pinned} pinned ones, exceed max_pinned_blocks "
                    f"({self._max_blocks})",
                )
            self._num_blocks[pin] = num_blocks

    def _give_up(self, pin: Pin, error: Exception, future: Future[int]) -> None:
        with self._lock:
            del self._num_blocks[pin]
        future.set_exception(error)

    def _compute(self, pin: Pin, request: Request, future: Future[int]) -> None:
        """Submit a request for a prefix under a new request id."""
        request = dataclasses.replace(request, request_id=f"pin_prefix/{pin[1]}/{next(self._numbers)}")
        try:
            self._submit(request, lambda event: self._take(pin, event, future))
        except JpagedError as error:
            self._give_up(pin, error, future)

    def _take(self, pin: Pin, event: OutputEvent, future: Future[int]) -> None:
        """Handle an event of a request for a prefix. The last one pins its blocks before the request releases them."""
        if not event.is_last:
            return
        error = event.error
        if error is None and event.finish is not None and event.finish.reason is FinishReason.ABORT:
            error = Cancelled(f"the request for prefix {pin[1]!r} was aborted")
        if error is None:
            group = self._groups[event.request_id]
            if not group.has_prompt_blocks:  # it was preempted with its last token in flight
                self._compute(pin, group.request, future)
                return
            try:
                future.set_result(self._keep(pin, group))
                return
            except InvalidArgument as no_room:
                error = no_room
        self._give_up(pin, error, future)

    def _keep(self, pin: Pin, group: SequenceGroup) -> int:
        """Pin the blocks that a request has computed; return the number of pinned tokens.

        Raises:
            InvalidArgument: too few blocks would be left for another request in flight to run alone.
        """
        assert self._prefixes is not None
        num_tokens = self._prefixes.pin(pin, group.live[0])
        num_pinned = len(self._prefixes.pinned_blocks)
        limit = self._limit() // self._geometry.dp_size
        others = [other for other in self._groups.values() if other is not group]
        needed = max((other.num_blocks_alone(self._geometry) for other in others), default=0)
        if limit - num_pinned < needed:
            self._prefixes.unpin(pin)
            raise InvalidArgument(
                "token_ids",
                f"{num_pinned} pinned blocks would leave {limit - num_pinned} of {limit}; a request in flight may "
                f"need {needed}",
            )
        with self._lock:
            self._pinned.add(pin)
        return num_tokens

    def _check(self, token_ids: tuple[int, ...]) -> int:
        """Validate a prefix; return the number of blocks that later tokens attend to, over all KV groups."""
        if self._prefixes is None:
            raise Unsupported("a prefix cannot be pinned: the prefix cache is off (enable_prefix_caching, kv_policy)")
        geometry, count = self._geometry, len(token_ids)
        for token_id in token_ids:
            if not isinstance(token_id, int) or not 0 <= token_id < geometry.vocab_size:
                raise InvalidArgument(
                    "token_ids", f"{token_id!r} is not a token id from 0 to {geometry.vocab_size - 1}"
                )
        if count >= geometry.max_model_len:
            raise InvalidArgument("token_ids", f"{count} tokens are not below max_model_len ({geometry.max_model_len})")
        num_blocks = self._prefixes.num_cacheable_blocks(count)
        if num_blocks == 0:
            cause = f"do not fill a block of {geometry.block_size}"
            if count >= geometry.block_size:
                cause = f"exceed max_cached_tokens ({self._prefixes.max_tokens})"
            raise InvalidArgument("token_ids", f"{count} tokens {cause}: there is nothing to pin")
        return sum(len(reach.seen(num_blocks)) for reach in geometry.reaches)
