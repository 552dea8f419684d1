"""The order in which waiting groups are admitted, and in which running ones yield.

    fcfs       first come, first served
    priority   lower numbers first, then first come; a waiting request takes the place of a running one with a higher
               number. Nobody starves: who was overtaken MAX_OVERTAKES times is served as if its number were the lowest
    fair       the tenant that was served least goes first, by the virtual token counter of "Fairness in Serving Large
               Language Models" (Sheng et al., 2024): a prompt token counts 1, a generated one 2; a tenant that comes
               back after a pause begins at the lowest counter of those who waited, so idleness saves nothing up;
               of MAX_TENANTS that were served most the counters are kept, the others begin at the highest of theirs

An order knows groups and what they were served; it holds no queue.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from jpaged.config import Policy
from jpaged.engine.sequence import Group

MAX_OVERTAKES = 256
PROMPT_TOKEN_WEIGHT = 1
OUTPUT_TOKEN_WEIGHT = 2
MAX_TENANTS = 4096
"""Whose counters are kept at least; names are the callers' to choose, so there is no end of them."""


class SchedulingPolicy(Protocol):
    """Who comes first."""

    def first_waiting(self, waiting: Collection[Group]) -> Group:
        """The next to be admitted; `waiting` is not empty and in order of arrival."""
        ...

    def running_key(self, group: Group) -> tuple[int, ...]:
        """Running groups are served in this order, and preempted from its end."""
        ...

    def yields_to(self, running: Group, waiting: Group) -> bool:
        """A running group is preempted to admit a waiting one."""
        ...

    def arrived(self, group: Group, waiting: Collection[Group]) -> None: ...

    def served(self, group: Group, num_prompt_tokens: int, num_output_tokens: int) -> None: ...


class FirstComeFirstServed:
    """Implements `SchedulingPolicy` by arrival."""

    def first_waiting(self, waiting: Collection[Group]) -> Group:
        return next(iter(waiting))

    def running_key(self, group: Group) -> tuple[int, ...]:
        return (group.arrival,)

    def yields_to(self, running: Group, waiting: Group) -> bool:
        return False

    def arrived(self, group: Group, waiting: Collection[Group]) -> None:
        """Arrival is all that counts, and the group carries it."""

    def served(self, group: Group, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """What was served changes nothing."""


class ByPriority(FirstComeFirstServed):
    """Implements `SchedulingPolicy` by the request's number, with a bound on how often one can be overtaken."""

    def first_waiting(self, waiting: Collection[Group]) -> Group:
        return min(waiting, key=self.running_key)

    def running_key(self, group: Group) -> tuple[int, ...]:
        is_late = group.num_overtaken >= MAX_OVERTAKES
        return (not is_late, 0 if is_late else group.request.sampling.priority, group.arrival)

    def yields_to(self, running: Group, waiting: Group) -> bool:
        return self.running_key(running)[:2] > self.running_key(waiting)[:2]


class FairByTenant(FirstComeFirstServed):
    """Implements `SchedulingPolicy` by what each tenant was served so far."""

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

    def _counter(self, tenant: str) -> int:
        return self._served.get(tenant, self._forgotten)

    def _forget(self, waiting: set[str]) -> None:
        """Leaves those who wait, and those who were served most."""
        by_counter = sorted(self._served, key=lambda tenant: self._served[tenant])
        leaving = [tenant for tenant in by_counter[:-MAX_TENANTS] if tenant not in waiting]
        for tenant in leaving:
            self._forgotten = max(self._forgotten, self._served.pop(tenant))


def make_policy(policy: Policy) -> SchedulingPolicy:
    """The order of that name."""
    match policy:
        case "fcfs":
            return FirstComeFirstServed()
        case "priority":
            return ByPriority()
        case "fair":
            return FairByTenant()
