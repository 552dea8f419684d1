"""Thread-safe inspector of a server's pools: snapshots, and limits of their size."""

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
    """Inspector of one pool.

    Args:
        ask: posts a callable to the engine thread, to run between two steps.
        groups: groups in flight; read on that thread.
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
        """Return a future snapshot, taken before the next step."""
        future: Future[PoolPicture] = Future()
        future.set_running_or_notify_cancel()
        self._ask(lambda: future.set_result(self._watch.picture(self._stats.snapshot(0))))
        return future

    def limit(self, num_blocks: int) -> Future[int]:
        """Limit the blocks available to requests and pins; see `Eyes.limit`."""
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
            raise Unsupported("the pool cannot be limited: contiguous allocation uses all of it (kv_policy)")
        if not 1 <= num_blocks <= self._memory.num_blocks:
            raise InvalidArgument("blocks", f"{num_blocks} is out of range: from 1 to {self._memory.num_blocks}")
        prefixes = self._memory.prefixes
        num_pinned = 0 if prefixes is None else len(prefixes.pinned_blocks)
        alone = (group.num_blocks_alone(self._geometry) for group in self._groups.values())
        needed = num_pinned + max(alone, default=0)
        if num_blocks < needed:
            what = (
                f"{num_blocks} blocks are fewer than the {needed} that pinned prefixes and the longest request in "
                "flight may need"
            )
            raise InvalidArgument("blocks", what)
        aside.leave(num_blocks)
        return self._memory.num_blocks - num_blocks - aside.num_blocks


class Eyes:
    """Inspectors of all pools of a server, one per replica. Thread-safe.

    Attributes:
        limited_to: limit of each pool, set by a viewer; None for no limit.
    """

    def __init__(self, each: Iterable[Eye]) -> None:
        self.each = tuple(each)
        self.limited_to: int | None = None

    def note_limit(self, num_blocks: int | None) -> None:
        """Record the limit that all pools have accepted."""
        self.limited_to = num_blocks

    def pictures(self) -> tuple[Future[PoolPicture], ...]:
        """Return a future snapshot of each pool; that of a hanging engine never completes."""
        return tuple(eye.picture() for eye in self.each)

    def limit(self, num_blocks: int | None) -> Sequence[Future[int]]:
        """Limit the blocks of each pool that requests may use; None removes the limit.

        Returns:
            for each pool the number of blocks that must still be freed before the limit holds; a repeated call reserves
            them. Or the error: InvalidArgument if requests in flight or pins need more, and Unsupported for a KV memory
            that reserves contiguous regions.
        """
        return [eye.limit(eye.num_blocks if num_blocks is None else num_blocks) for eye in self.each]
