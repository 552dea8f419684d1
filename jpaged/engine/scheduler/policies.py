"""Scheduling policies other than first come, first served, and the table of all.

priority   lower numbers first; a waiting request preempts a running one with a higher number
fair       the tenant that has been served least goes first
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from jpaged.config import Policy
from jpaged.engine.scheduler.scheduler import SchedulingPolicy
from jpaged.engine.sequence import SequenceGroup

MAX_OVERTAKES = 256
PROMPT_TOKEN_WEIGHT = 1
OUTPUT_TOKEN_WEIGHT = 2
MAX_TENANTS = 4096
"""Number of highest counters that are always kept; clients choose tenant names, so their number is unbounded."""


class ByPriority(SchedulingPolicy):
    """Lower priority numbers first, then first come, first served.

    A waiting request preempts a running one with a higher number. No request starves: after it was overtaken
    MAX_OVERTAKES times, it is served as if its number were the lowest.
    """

    def first_waiting(self, waiting: Collection[SequenceGroup]) -> SequenceGroup:
        return min(waiting, key=self.running_key)

    def running_key(self, group: SequenceGroup) -> tuple[int, ...]:
        is_late = group.num_overtaken >= MAX_OVERTAKES
        return (not is_late, 0 if is_late else group.request.sampling.priority, group.arrival)

    def can_preempt(self, running: SequenceGroup, waiting: SequenceGroup) -> bool:
        return self.running_key(running)[:2] > self.running_key(waiting)[:2]


class FairByTenant(SchedulingPolicy):
    """The tenant that has been served least goes first.

    This is the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., 2024): a prompt
    token counts 1, a generated one 2. A tenant that returns after a pause starts at the lowest counter of the waiting
    tenants, so that idle time gives no credit. The MAX_TENANTS highest counters are always kept; unknown tenants
    start at the highest counter that was dropped.
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._highest_dropped = 0

    def first_waiting(self, waiting: Collection[SequenceGroup]) -> SequenceGroup:
        return min(waiting, key=lambda group: (self._counter(group.request.tenant), group.arrival))

    def arrived(self, group: SequenceGroup, waiting: Collection[SequenceGroup]) -> None:
        tenant = group.request.tenant
        others = {other.request.tenant for other in waiting if other is not group}
        if tenant not in others:
            highest = max(self._served.values(), default=self._highest_dropped)
            floor = min((self._counter(other) for other in others), default=highest)
            self._served[tenant] = max(self._counter(tenant), floor)
        if len(self._served) > 2 * MAX_TENANTS:
            self._drop_counters(others | {tenant})

    def served(self, group: SequenceGroup, num_prompt_tokens: int, num_output_tokens: int) -> None:
        weighted = PROMPT_TOKEN_WEIGHT * num_prompt_tokens + OUTPUT_TOKEN_WEIGHT * num_output_tokens
        tenant = group.request.tenant
        self._served[tenant] = self._counter(tenant) + weighted

    def decoded(self, groups: Iterable[SequenceGroup]) -> None:
        for group in groups:
            self.served(group, 0, 1)

    def _counter(self, tenant: str) -> int:
        return self._served.get(tenant, self._highest_dropped)

    def _drop_counters(self, waiting: set[str]) -> None:
        """Drop the counters of tenants that do not wait and are not among the most served."""
        by_counter = sorted(self._served, key=lambda tenant: self._served[tenant])
        leaving = [tenant for tenant in by_counter[:-MAX_TENANTS] if tenant not in waiting]
        for tenant in leaving:
            self._highest_dropped = max(self._highest_dropped, self._served.pop(tenant))


POLICIES: dict[Policy, type[SchedulingPolicy]] = {
    "fcfs": SchedulingPolicy,
    "priority": ByPriority,
    "fair": FairByTenant,
}
