"""The order in which waiting groups are admitted, and in which running ones yield.

    fcfs       first come, first served
    priority   lower numbers first, then first come; a waiting request takes the place of a running one with a higher
               number. Nobody starves: who was overtaken MAX_OVERTAKES times is served as if its number were the lowest
    fair       the tenant that was served least goes first, by the virtual token counter of "Fairness in Serving Large
               Language Models" (Sheng et al., 2024): a prompt token counts 1, a generated one 2; a tenant that comes
               back after a pause begins at the lowest counter of those who waited, so idleness saves nothing up

An order knows groups and what they were served; it holds no queue.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from jpaged.engine.sequence import Group
from jpaged.errors import InternalError

MAX_OVERTAKES = 256
PROMPT_TOKEN_WEIGHT = 1
OUTPUT_TOKEN_WEIGHT = 2

POLICIES = ("fcfs", "priority", "fair")


class Order(Protocol):
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
    """Implements `Order` by arrival."""

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
    """Implements `Order` by the request's number, with a bound on how often one can be overtaken."""

    def first_waiting(self, waiting: Collection[Group]) -> Group:
        return min(waiting, key=self.running_key)

    def running_key(self, group: Group) -> tuple[int, ...]:
        is_late = group.num_overtaken >= MAX_OVERTAKES
        return (not is_late, 0 if is_late else group.request.sampling.priority, group.arrival)

    def yields_to(self, running: Group, waiting: Group) -> bool:
        return self.running_key(running)[:2] > self.running_key(waiting)[:2]


class FairByTenant(FirstComeFirstServed):
    """Implements `Order` by what each tenant was served so far."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}

    def first_waiting(self, waiting: Collection[Group]) -> Group:
        return min(waiting, key=lambda group: (self._served[group.request.tenant], group.arrival))

    def arrived(self, group: Group, waiting: Collection[Group]) -> None:
        tenant = group.request.tenant
        others = {other.request.tenant for other in waiting if other is not group}
        if tenant not in others:
            floor = min((self._served[other] for other in others), default=max(self._served.values(), default=0))
            self._served[tenant] = max(self._served.get(tenant, 0), floor)

    def served(self, group: Group, num_prompt_tokens: int, num_output_tokens: int) -> None:
        weighted = PROMPT_TOKEN_WEIGHT * num_prompt_tokens + OUTPUT_TOKEN_WEIGHT * num_output_tokens
        self._served[group.request.tenant] += weighted


def make_order(policy: str) -> Order:
    """The order of that name."""
    match policy:
        case "fcfs":
            return FirstComeFirstServed()
        case "priority":
            return ByPriority()
        case "fair":
            return FairByTenant()
        case _:
            raise InternalError(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
