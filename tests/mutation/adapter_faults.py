"""Faults of adapters: whose slot it is, and what is found of others."""

from __future__ import annotations

from tests.mutation.planting import Fault

ADAPTERS = ("test_adapters.py",)

ADAPTER_FAULTS = (
    Fault(
        "adapters share cached prefixes",
        "sequence.py",
        "whose = request.cache_tenant, request.adapter_digest",
        'whose = request.cache_tenant, b""',
        ADAPTERS,
    ),
    Fault(
        "replicas are chosen by prefixes of other adapters",
        "data_parallel/routing.py",
        "request.cache_tenant, request.adapter_digest)",
        'request.cache_tenant, b"")',
        ADAPTERS,
    ),
    Fault(
        "a slot that is held is overwritten",
        "adapters.py",
        "        self._free.pop(slot, None)\n",
        "",
        ADAPTERS,
    ),
    Fault(
        "the slot that was held last is overwritten first",
        "adapters.py",
        "slot = next(iter(self._free))",
        "slot = list(self._free)[-1]",
        ADAPTERS,
    ),
    Fault(
        "a slot is not given back by who is preempted",
        "scheduling/scheduler.py",
        "            self.adapters.give_back(group)\n        group.preempted()\n",
        "            pass\n        group.preempted()\n",
        ADAPTERS,
    ),
    Fault(
        "a slot is not given back by who ends",
        "scheduling/scheduler.py",
        "            self.adapters.give_back(group)\n        for sequence",
        "            pass\n        for sequence",
        ADAPTERS,
    ),
    Fault(
        "rows that moved keep the slot of others",
        "scheduling/rows.py",
        "            self._adapters_s,\n",
        "",
        ADAPTERS,
    ),
    Fault(
        "rows in another order have the slots of others",
        "scheduling/schedule.py",
        "        slots = slots[schedule.order] if schedule.order else slots\n",
        "",
        ADAPTERS,
    ),
    Fault(
        "who holds no slot is preempted for one",
        "adapters.py",
        "if adapter is None or self.can_take(adapter):\n",
        "if True:\n",
        ADAPTERS,
    ),
    Fault(
        "a group runs although every slot is held",
        "scheduling/scheduler.py",
        "not self.adapters.can_take(group.request.adapter)",
        "False",
        ADAPTERS,
    ),
)
