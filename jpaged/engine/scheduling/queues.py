"""Queues of unfinished groups: waiting, running, swapped out; and their order: first come, first served."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import takewhile

from jpaged.engine.sequence import Group, Status


class SchedulingPolicy:
    """Order in which waiting groups are admitted and running groups are preempted.

    The default is first come, first served. A policy knows groups and the service they received; it holds no queue.
    """

    def first_waiting(self, waiting: Collection[Group]) -> Group:
        """Return the next group to admit; `waiting` is not empty and in order of arrival."""
        return next(iter(waiting))

    def running_key(self, group: Group) -> tuple[int, ...]:
        """Return the sort key of a running group: groups are served in this order, and preempted from its end."""
        return (group.arrival,)

    def yields_to(self, running: Group, waiting: Group) -> bool:
        """Return True if the running group may be preempted to admit the waiting one."""
        return False

    def yielding_to(self, waiting: Group, running: Sequence[Group]) -> Iterator[Group]:
        """Yield the running groups that may be preempted for a waiting one, from the end of their order."""
        return takewhile(lambda group: self.yields_to(group, waiting), reversed(running))

    def arrived(self, group: Group, waiting: Collection[Group]) -> None:
        """Record a group that starts to wait; `waiting` are the waiting groups."""

    def served(self, group: Group, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Record the tokens that a group was served."""

    def decoded(self, groups: Iterable[Group]) -> None:
        """Record one output token for each group, as `served` does; a group may occur several times."""


class Queues:
    """Every unfinished group, by status. Each method moves a group and sets its status.

    Attributes:
        fetched_for: groups that wait outside the queue while their prefix is loaded from disk; others overtake them.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.waiting: dict[Group, None] = {}  # in order of arrival
        self.fetched_for: dict[Group, None] = {}
        self.running: list[Group] = []  # in the policy's order
        self.swapped: list[Group] = []
        # Running groups that have ended; in a static batch they keep rows and blocks until the whole batch has ended.
        self.ended: list[Group] = []
        self.num_rows = 0
        self._policy = policy

    @property
    def num_waiting(self) -> int:
        """Number of groups that wait for rows or blocks, with the swapped ones."""
        return len(self.waiting) + len(self.swapped)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.swapped)

    @property
    def holders(self) -> Iterable[Group]:
        """Every group that holds blocks on the device."""
        return [*self.running, *self.ended]

    def groups(self) -> Iterator[Group]:
        yield from self.holders
        yield from self.swapped
        yield from self.waiting
        yield from self.fetched_for

    def next_group(self) -> Group | None:
        """Return the next group: a swapped one, or a waiting one that comes before it.

        A waiting group comes before if it may preempt the swapped one, or was preempted itself and is earlier in the
        order.
        """
        waiting = self._policy.first_waiting(self.waiting) if self.waiting else None
        if not self.swapped:
            return waiting
        swapped = min(self.swapped, key=self._policy.running_key)
        if waiting is None:
            return swapped
        is_earlier = waiting.num_preemptions and self._policy.running_key(waiting) < self._policy.running_key(swapped)
        return waiting if is_earlier or self._policy.yields_to(swapped, waiting) else swapped

    def has_next_within(self, max_num_rows: int) -> bool:
        """Return True if there is a next group and its rows fit into max_num_rows; blocks are not checked."""
        if self.num_rows >= max_num_rows:  # a full batch needs no search of the queue
            return False
        group = self.next_group()
        return group is not None and self.num_rows + group.num_rows <= max_num_rows

    def add(self, group: Group) -> None:
        self._policy.arrived(group, self.waiting)
        self.waiting[group] = None

    def hold(self, group: Group) -> None:
        """Keep a group that has just arrived out of the queue until `let_in`."""
        self.fetched_for[group] = None

    def let_in(self, groups: Iterable[Group]) -> None:
        """Move held groups to the waiting queue, each at its place by arrival."""
        for group in groups:
            del self.fetched_for[group]
            self._policy.arrived(group, self.waiting)
            self._insert(group)

    def run(self, group: Group) -> None:
        """Start a waiting or swapped group and reserve its rows."""
        if group.status is Status.SWAPPED:
            self.swapped.remove(group)
        else:
            del self.waiting[group]
        group.move_to(Status.RUNNING)
        insort(self.running, group, key=self._policy.running_key)
        self.num_rows += group.num_rows

    def stop_running(self, group: Group) -> None:
        """Remove a running group and free its rows; `put_back` or `put_aside` follows."""
        self.running.remove(group)
        self.num_rows -= group.num_rows

    def put_aside(self, group: Group) -> None:
        """Add a group that was swapped out."""
        group.move_to(Status.SWAPPED)
        self.swapped.append(group)

    def put_back(self, group: Group) -> None:
        """Return a preempted group to the waiting queue, at its place by arrival."""
        group.move_to(Status.WAITING)
        self._insert(group)

    def _insert(self, group: Group) -> None:
        later = [other for other in self.waiting if other.arrival > group.arrival]
        self.waiting[group] = None
        for other in later:
            del self.waiting[other]
            self.waiting[other] = None

    def end(self, group: Group) -> bool:
        """Finish a group in any state. Return True if it was running; it is then kept until `forget_ended`."""
        was_running = group.status is Status.RUNNING
        if was_running:
            self.running.remove(group)
            self.ended.append(group)
        elif group.status is Status.SWAPPED:
            self.swapped.remove(group)
        elif group in self.fetched_for:
            del self.fetched_for[group]
        else:
            del self.waiting[group]
        group.move_to(Status.FINISHED)
        return was_running

    def forget_ended(self) -> list[Group]:
        """Remove and return the running groups that have ended, and free their rows."""
        ended, self.ended = self.ended, []
        self.num_rows -= sum(group.num_rows for group in ended)
        return ended
