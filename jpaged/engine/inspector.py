"""Pool snapshots between two steps, and the events between snapshots.

    snapshot ─── note ── note ── note ─── snapshot         the first snapshot starts the recording
                └──── recorded events ────┘                without another for some seconds it stops

Everything here runs on the engine thread and copies; work that grows with the pool is in numpy.

Thread-safe inspector of a server's pools: snapshots, and limits of their size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as AbcSequence
from concurrent.futures import Future
from itertools import islice

from jpaged.engine.executor import Geometry, Move
from jpaged.engine.kv_cache.blocks import BlockTable
from jpaged.engine.kv_cache.interface import KVCacheManager
from jpaged.engine.observers import StepObservers
from jpaged.engine.scheduler.output import SchedulerOutput
from jpaged.engine.scheduler.scheduler import Scheduler
from jpaged.engine.sequence import Sequence, SequenceGroup, Status
from jpaged.engine.stats import StepStats
from jpaged.errors import InvalidArgument, JpagedError, Unsupported
from jpaged.pool import I32, PoolEvent, PoolSnapshot, RequestSnapshot, SequenceSnapshot
from jpaged.server_load import EngineLoad

_NOTES_S = 3.0
"""Seconds after a snapshot during which events are recorded for the next one."""
_MAX_NOTES = 500
_MAX_WAITING = 100
"""Maximum number of waiting requests in a snapshot."""
_MAX_BLOCKS_LISTED = 64
_TOTALS = (
    "num_steps",
    "num_preemptions",
    "num_recomputed_tokens",
    "num_copies_on_write",
    "num_blocks_swapped_out",
    "num_blocks_swapped_in",
    "num_prompt_tokens",
    "num_generation_tokens",
    "num_prefix_query_tokens",
    "num_prefix_hit_tokens",
    "num_requests_ended",
)


class PoolSnapshotter:
    """Snapshotter of one engine's pool.

    Attributes:
        is_on: events are recorded.

    Args:
        observers: of the loop; the snapshotter is one of them while it is on.
    """

    def __init__(
        self,
        geometry: Geometry,
        memory: KVCacheManager,
        scheduler: Scheduler,
        clock: Callable[[], float],
        observers: StepObservers,
    ) -> None:
        self.is_on = False
        self._observers = observers
        self._geometry = geometry
        self._memory = memory
        self._scheduler = scheduler
        self._clock = clock
        self._until_s = 0.0
        self._num_notes = 0
        self._num_forks = 0
        self._notes: deque[PoolEvent] = deque(maxlen=_MAX_NOTES)
        self._known: dict[SequenceGroup, None] = {}
        self._holding: dict[SequenceGroup, frozenset[Sequence]] = {}

    def note(self, schedule: SchedulerOutput) -> None:
        """Record the events of a step that was just decided."""
        if self._clock() > self._until_s:
            self._end()
            return
        for group in schedule.preempted:
            kind = "preemption_swap" if group.status is Status.SWAPPED else "preemption_recompute"
            self._note(kind, group)
        for group in schedule.admitted:
            self._known[group] = None
            kind = "admission" if group.num_preemptions == 0 else "resumption"
            self._note(kind, group, why=group.request.request_id)
        self._note_forks()
        self._note_moves(schedule)
        self._note_ends()

    def snapshot(self, load: EngineLoad) -> PoolSnapshot:
        """Return a snapshot of the pool, with the events since the last one.

        Args:
            load: counters of the last step.
        """
        if not self.is_on:
            self._begin()
        self._until_s = self._clock() + _NOTES_S
        queues, geometry = self._scheduler.queues, self._geometry
        self._note_ends()
        occupied = [*queues.holders, *queues.swapped]
        self._known.update(dict.fromkeys(occupied))
        shown = [*occupied, *islice(queues.waiting, _MAX_WAITING)]
        happenings = tuple(self._notes)
        self._notes.clear()
        totals = {name: getattr(load, name) for name in _TOTALS}
        return PoolSnapshot(
            time_s=self._clock(),
            num_blocks=geometry.num_blocks,
            num_host_blocks=geometry.num_host_blocks,
            block_size=geometry.block_size,
            num_kv_groups=len(geometry.windows),
            limit=self._memory.limit,
            marks=self._memory.marks(),
            occupants=tuple(map(_occupant, shown)),
            num_waiting=len(queues.waiting),
            happenings=happenings,
            totals=totals | {"num_forks": self._num_forks},
        )

    # --- notes ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.is_on = True
        self._observers.on_scheduled.append(self.note)
        queues = self._scheduler.queues
        self._holding = {group: _holders(group) for group in [*queues.running, *queues.swapped] if group.num_rows > 1}

    def _end(self) -> None:
        """Stop recording: no snapshot was requested for some seconds."""
        self.is_on = False
        self._observers.on_scheduled.remove(self.note)
        self._notes.clear()
        self._known.clear()
        self._holding.clear()

    def _note(
        self, kind: str, group: SequenceGroup | None, *, count: int = 1, blocks: Iterable[int] = (), why: str = ""
    ) -> None:
        self._num_notes += 1
        request = None if group is None else group.arrival
        listed = tuple(islice(blocks, _MAX_BLOCKS_LISTED))
        self._notes.append(PoolEvent(self._num_notes, kind, request, count, listed, why))

    def _note_forks(self) -> None:
        """Record forks: sequences that now hold blocks and did not in the previous step, in a group that did."""
        queues = self._scheduler.queues
        for group in queues.running:
            if group.num_rows == 1:
                continue
            before, now = self._holding.get(group, frozenset()), _holders(group)
            num_new = len(now - before) - (0 if before else 1)
            if num_new > 0:
                self._num_forks += num_new
                leader = next(iter(group.live), None)
                blocks = () if leader is None else leader.kv.tables[0].block_ids()
                self._note("fork", group, count=num_new, blocks=blocks)
            self._holding[group] = now
        gone = [group for group in self._holding if group.status in (Status.FINISHED, Status.WAITING)]
        for group in gone:
            del self._holding[group]

    def _note_moves(self, schedule: SchedulerOutput) -> None:
        new = _get_blocks(table for group in schedule.admitted for one in group.live for table in one.kv.tables)
        away = _get_blocks(table for group in schedule.preempted for one in group.live for table in one.kv.host_tables)
        passing = schedule.ops.passing
        for moves in schedule.ops.batches():
            pairs = list(zip(moves.sources, moves.destinations, strict=True))
            if moves.move is Move.COPY:
                for source, destination in pairs:
                    kind = "prefix_copy" if destination in new else "copy_on_write"
                    self._note(kind, None, blocks=(source, destination))
                continue
            is_out = moves.move is Move.SWAP_OUT
            kinds = ("eviction", "swap_out", "prefix_out") if is_out else ("swap_in", "prefix_in", "prefix_in")
            sides: tuple[list[int], list[int], list[int]] = ([], [], [])
            for source, destination in pairs:
                passes = (moves.move, source, destination) in passing
                side = 2 if passes else destination in (away if is_out else new)
                sides[side].extend((source, destination))
            for kind, blocks in zip(kinds, sides, strict=True):
                if blocks:
                    self._note(kind, None, count=len(blocks) // 2, blocks=blocks)

    def _note_ends(self) -> None:
        ended = [group for group in self._known if group.status is Status.FINISHED]
        for group in ended:
            del self._known[group]
            self._note("end", group, why=group.ended_by or "error")


def _get_blocks(tables: Iterable[BlockTable]) -> set[int]:
    return {block_id for table in tables for block_id in table.block_ids()}


def _holders(group: SequenceGroup) -> frozenset[Sequence]:
    kept = [(sequence, sequence.kv) for sequence in group.sequences]
    return frozenset(sequence for sequence, kv in kept if kv.num_blocks or kv.host_tables[0].num_blocks)


def _occupant(group: SequenceGroup) -> RequestSnapshot:
    chains = []
    for sequence in group.sequences:
        kv = sequence.kv
        if sequence.is_live or kv.num_blocks:
            host_tables = _copied(kv.host_tables) if group.status is Status.SWAPPED else ()
            chains.append(SequenceSnapshot(sequence.index, sequence.num_tokens, _copied(kv.tables), host_tables))
    return RequestSnapshot(
        group.arrival,
        group.request.request_id,
        group.status.value,
        len(group.request.prompt_token_ids),
        group.num_cached_tokens or 0,
        group.num_preemptions,
        tuple(chains),
    )


def _copied(tables: tuple[BlockTable, ...]) -> tuple[I32, ...]:
    """Return copies of the used part of each table."""
    return tuple([table.ids_m[: table.num_blocks].copy() for table in tables])


class ReplicaInspector:
    """Inspector of one pool.

    Args:
        ask: posts a callable to the engine thread, to run between two steps.
        groups: groups in flight; read on that thread.
    """

    def __init__(
        self,
        watch: PoolSnapshotter,
        memory: KVCacheManager,
        stats: StepStats,
        groups: Mapping[str, SequenceGroup],
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

    def snapshot(self) -> Future[PoolSnapshot]:
        """Return a future snapshot, taken before the next step."""
        future: Future[PoolSnapshot] = Future()
        future.set_running_or_notify_cancel()
        self._ask(lambda: future.set_result(self._watch.snapshot(self._stats.snapshot(0))))
        return future

    def limit(self, num_blocks: int) -> Future[int]:
        """Limit the blocks available to requests and pins; see `PoolInspector.limit`."""
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
        limiter = self._memory.limiter
        if limiter is None:
            raise Unsupported("the pool cannot be limited: contiguous allocation uses all of it (kv_policy)")
        if not 1 <= num_blocks <= self._memory.num_blocks:
            raise InvalidArgument("blocks", f"{num_blocks} is out of range: from 1 to {self._memory.num_blocks}")
        prefixes = self._memory.prefixes
        num_pinned = 0 if prefixes is None else len(prefixes.pinned_blocks)
        alone = (group.num_blocks_alone(self._geometry) for group in self._groups.values())
        needed = (num_pinned + max(alone, default=0)) * self._geometry.dp_size
        if num_blocks < needed:
            what = (
                f"{num_blocks} blocks are fewer than the {needed} that pinned prefixes and the longest request in "
                "flight may need"
            )
            raise InvalidArgument("blocks", what)
        limiter.leave(num_blocks)
        return self._memory.num_blocks - num_blocks - limiter.num_blocks


class PoolInspector:
    """Inspectors of all pools of a server, one per replica. Thread-safe.

    Attributes:
        limited_to: limit of each pool, set by a viewer; None for no limit.
    """

    def __init__(self, each: Iterable[ReplicaInspector]) -> None:
        self.each = tuple(each)
        self.limited_to: int | None = None

    def note_limit(self, num_blocks: int | None) -> None:
        """Record the limit that all pools have accepted."""
        self.limited_to = num_blocks

    def snapshots(self) -> tuple[Future[PoolSnapshot], ...]:
        """Return a future snapshot of each pool; that of a hanging engine never completes."""
        return tuple(eye.snapshot() for eye in self.each)

    def limit(self, num_blocks: int | None) -> AbcSequence[Future[int]]:
        """Limit the blocks of each pool that requests may use; None removes the limit.

        Returns:
            for each pool the number of blocks that must still be freed before the limit holds; a repeated call reserves
            them. Or the error: InvalidArgument if requests in flight or pins need more, and Unsupported for a KV memory
            that reserves contiguous regions.
        """
        return [eye.limit(eye.num_blocks if num_blocks is None else num_blocks) for eye in self.each]
