"""Who comes first: the order in which waiting groups are admitted, and in which running ones yield.

fcfs       first come, first served
priority   lower numbers first; a waiting request takes the place of a running one with a higher number
fair       the tenant that was served least goes first
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import takewhile

from jpaged.config import Policy
from jpaged.engine.sequence import Group

MAX_OVERTAKES = 256
PROMPT_TOKEN_WEIGHT = 1
OUTPUT_TOKEN_WEIGHT = 2
MAX_TENANTS = 4096
"""Tenants whose counters are kept at least: callers choose the names, so their number has no bound."""


class SchedulingPolicy:
    """Who comes first: the order in which waiting groups are admitted, and in which running ones yield.

    First come, first served, where a policy does not say otherwise. It knows groups and what they were served; it holds
    no queue.
    """

    def first_waiting(self, waiting: Collection[Group]) -> Group:
        """The next to be admitted; `waiting` is not empty and in order of arrival."""
        return next(iter(waiting))

    def running_key(self, group: Group) -> tuple[int, ...]:
        """Running groups are served in this order, and preempted from its end."""
        return (group.arrival,)

    def yields_to(self, running: Group, waiting: Group) -> bool:
        """A running group is preempted to admit a waiting one."""
        return False

    def yielding_to(self, waiting: Group, running: Sequence[Group]) -> Iterator[Group]:
        """Those of the running groups that yield to a waiting one, from the end of their order."""
        return takewhile(lambda group: self.yields_to(group, waiting), reversed(running))

    def arrived(self, group: Group, waiting: Collection[Group]) -> None:
        """Notes a group that waits from now on, beside these."""

    def served(self, group: Group, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Notes the tokens that a group was given."""

    def decoded(self, groups: Iterable[Group]) -> None:
        """Notes an output token for each of these, as `served` does; a group may be named several times."""


class ByPriority(SchedulingPolicy):
    """Lower numbers first, then first come.

    A waiting request takes the place of a running one with a higher number. Nobody starves: who was overtaken
    MAX_OVERTAKES times is served as if its number were the lowest.
    """

    def first_waiting(self, waiting: Collection[Group]) -> Group:
        return min(waiting, key=self.running_key)

    def running_key(self, group: Group) -> tuple[int, ...]:
        is_late = group.num_overtaken >= MAX_OVERTAKES
        return (not is_late, 0 if is_late else group.request.sampling.priority, group.arrival)

    def yields_to(self, running: Group, waiting: Group) -> bool:
        return self.running_key(running)[:2] > self.running_key(waiting)[:2]


class FairByTenant(SchedulingPolicy):
    """The tenant that was served least goes first.

    It is the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., 2024): a prompt token
    counts 1, a generated one 2; a tenant that comes back after a pause begins at the lowest counter of those who
    waited, so idleness saves nothing up. Of MAX_TENANTS that were served most the counters are kept; the others begin
    at the highest of theirs.
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._forgotten = 0

    def first_waiting(self, waiting: Collection[Group]) -> Group:
        return min(waiting, key=lambda group: (self._counter(group.request.tenant), group.arrival))

    def arrived(self, group: Group, waiting: Collection[Group]) -> None:
        tenant = group.request.tenant
        others = {other.request.tenant for other in waiting if other is not group}
        if tenant not in others:
            highest = max(self._served.values(), default=self._forgotten)
            floor = min((self._counter(other) for other in others), default=highest)
            self._served[tenant] = max(self._counter(tenant), floor)
        if len(self._served) > 2 * MAX_TENANTS:
            self._forget(others | {tenant})

    def served(self, group: Group, num_prompt_tokens: int, num_output_tokens: int) -> None:
        weighted = PROMPT_TOKEN_WEIGHT * num_prompt_tokens + OUTPUT_TOKEN_WEIGHT * num_output_tokens
        tenant = group.request.tenant
        self._served[tenant] = self._counter(tenant) + weighted

    def decoded(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self.served(group, 0, 1)

    def _counter(self, tenant: str) -> int:
        return self._served.get(tenant, self._forgotten)

    def _forget(self, waiting: set[str]) -> None:
        """Leaves those who wait, and those who were served most."""
        by_counter = sorted(self._served, key=lambda tenant: self._served[tenant])
        leaving = [tenant for tenant in by_counter[:-MAX_TENANTS] if tenant not in waiting]
        for tenant in leaving:
            self._forgotten = max(self._forgotten, self._served.pop(tenant))


POLICIES: dict[Policy, type[SchedulingPolicy]] = {
    "fcfs": SchedulingPolicy,
    "priority": ByPriority,
    "fair": FairByTenant,
}
