"""What any thread may ask about the pools of a server, to look at them and to make them smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

from jpaged.engine.executor import Geometry
from jpaged.engine.kv.interface import KVMemory
from jpaged.engine.sequence import Group
from jpaged.engine.stats import StepStats
from jpaged.engine.watching.watch import Watch
from jpaged.errors import InvalidArgument, JpagedError, Unsupported
from jpaged.pool import PoolPicture


class Eye:
    """One pool.

    Args:
        ask: has something done on the engine's thread, between two steps.
        groups: what is in flight; read on that thread.
    """

    def __init__(
        self,
        watch: Watch,
        memory: KVMemory,
        stats: StepStats,
        groups: Mapping[str, Group],
        geometry: Geometry,
        ask: Callable[[Callable[[], None]], None],
    ) -> None:
        self._watch = watch
        self._memory = memory
        self._stats = stats
        self._groups = groups
        self._geometry = geometry
        self._ask = ask

    @property
    def num_blocks(self) -> int:
        return self._memory.num_blocks

    def picture(self) -> Future[PoolPicture]:
        """Has a picture taken before the next step."""
        future: Future[PoolPicture] = Future()
        future.set_running_or_notify_cancel()
        self._ask(lambda: future.set_result(self._watch.picture(self._stats.snapshot(0))))
        return future

    def limit(self, num_blocks: int) -> Future[int]:
        """Leaves so many blocks to requests and pins; see `Eyes.limit`."""
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()

        def leave() -> None:
            try:
                future.set_result(self._leave(num_blocks))
            except JpagedError as error:
                future.set_exception(error)

        self._ask(leave)
        return future

    def _leave(self, num_blocks: int) -> int:
        aside = self._memory.aside
        if aside is None:
            raise Unsupported("the pool cannot be limited: memory that reserves has all of it (kv_policy)")
        if not 1 <= num_blocks <= self._memory.num_blocks:
            raise InvalidArgument("blocks", f"{num_blocks} is out of range: from 1 to {self._memory.num_blocks}")
        prefixes = self._memory.prefixes
        num_pinned = 0 if prefixes is None else len(prefixes.pinned_blocks)
        alone = (group.num_blocks_alone(self._geometry) for group in self._groups.values())
        needed = num_pinned + max(alone, default=0)
        if num_blocks < needed:
            what = f"{num_blocks} are fewer than the {needed} that pins and the longest request in flight may need"
            raise InvalidArgument("blocks", what)
        aside.leave(num_blocks)
        return self._memory.num_blocks - num_blocks - aside.num_blocks


class Eyes:
    """Every pool of a server: one, or one of each replica. Any thread may ask.

    Attributes:
        limited_to: blocks of each pool that a viewer has left to requests; None is all of them.
    """

    def __init__(self, each: Iterable[Eye]) -> None:
        self.each = tuple(each)
        self.limited_to: int | None = None

    def note_limit(self, num_blocks: int | None) -> None:
        """Note the limit that all pools have taken."""
        self.limited_to = num_blocks

    def pictures(self) -> tuple[Future[PoolPicture], ...]:
        """Has a picture taken of each pool, once its engine comes by; of an engine that hangs none comes."""
        return tuple(eye.picture() for eye in self.each)

    def limit(self, num_blocks: int | None) -> Sequence[Future[int]]:
        """Leaves so many blocks of each pool to requests, in place of all that there are; None is all.

        Returns:
            for each pool the number of blocks that have yet to come free before the limit holds; who asks again has
            them set aside then. Or the error: InvalidArgument where requests in flight or pins need more, and
            Unsupported for memory that reserves.
        """
        return [eye.limit(eye.num_blocks if num_blocks is None else num_blocks) for eye in self.each]
