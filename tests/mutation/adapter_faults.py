"""Faults of adapters and grammars: whose slot it is, what is found of others, masks that come while steps run."""

from __future__ import annotations

from tests.mutation.planting import Fault

ADAPTERS = ("test_adapters.py",)
GRAMMARS = ("test_grammars.py",)

ADAPTER_FAULTS = (
    Fault(
        "adapters share cached prefixes",
        "sequence.py",
        'whose = request.cache_tenant, b"" if adapter is None else adapter.matrices.digest',
        'whose = request.cache_tenant, b""',
        ADAPTERS,
    ),
    Fault(
        "replicas are chosen by prefixes of other adapters",
        "data_parallel.py",
        "request.cache_tenant, request.adapter_digest)",
        'request.cache_tenant, b"")',
        ADAPTERS,
    ),
    Fault(
        "a slot that is held is overwritten",
        "lora.py",
        "        self._free.pop(slot, None)\n",
        "",
        ADAPTERS,
    ),
    Fault(
        "the slot that was held last is overwritten first",
        "lora.py",
        "slot = next(iter(self._free))",
        "slot = list(self._free)[-1]",
        ADAPTERS,
    ),
    Fault(
        "a slot is not given back by who is preempted",
        "scheduler/scheduler.py",
        "            self.adapters.give_back(group)\n        group.preempted()\n",
        "            pass\n        group.preempted()\n",
        ADAPTERS,
    ),
    Fault(
        "a slot is not given back by who ends",
        "scheduler/scheduler.py",
        "            self.adapters.give_back(group)\n        for sequence",
        "            pass\n        for sequence",
        ADAPTERS,
    ),
    Fault(
        "rows that moved keep the slot of others",
        "scheduler/decode_batch.py",
        "            self._adapters_s,\n",
        "",
        ADAPTERS,
    ),
    Fault(
        "rows in another order have the slots of others",
        "scheduler/output.py",
        "        slots = slots[schedule.order] if schedule.order else slots\n",
        "",
        ADAPTERS,
    ),
    Fault(
        "who holds no slot is preempted for one",
        "lora.py",
        "if adapter is None or self.can_take(adapter):\n",
        "if True:\n",
        ADAPTERS,
    ),
    Fault(
        "a group runs although every slot is held",
        "scheduler/scheduler.py",
        "not self.adapters.can_take(group.request.adapter)",
        "False",
        ADAPTERS,
    ),
)

FEED_FAULTS = (
    Fault(
        "grammars move over tokens again when those are taken in",
        "results.py",
        "follows = schedule.has_grammars and kind is not StepKind.MASKED_MULTI_STEP",
        "follows = schedule.has_grammars",
        GRAMMARS,
    ),
    Fault(
        "steps are fed on when a row has ended",
        "runners.py",
        "verdict = StepDirective.GOES_ON if are_live and self.all_go_on else StepDirective.LAST",
        "verdict = StepDirective.GOES_ON",
        GRAMMARS,
    ),
    Fault(
        "a dispatch that was cut short counts as whole",
        "runners.py",
        "context.scheduler.truncate_steps(schedule, steps.serve())",
        "steps.serve()",
        GRAMMARS,
    ),
    Fault(
        "a grammar that fails on the way is fed on",
        "structured_output.py",
        "return is_sound and bool(num_words_r.all())",
        "return True",
        GRAMMARS,
    ),
    Fault(
        "steps are fed before what came before is taken in",
        "runners.py",
        "            self._give_first(steps)\n            context.finish_in_flight()\n",
        "            self._give_first(steps)\n",
        GRAMMARS,
    ),
    Fault(
        "what the last step gave is not followed",
        "runners.py",
        "        if not self.are_over:\n            self._take()\n",
        "        if not self.are_over:\n            self._columns.append(self._feed.wait())\n",
        GRAMMARS,
    ),
    Fault(
        "a row that has ended before is fed beside the others to their end",
        "runners.py",
        "are_live = all(one.is_live for one in schedule.sequences)",
        "are_live = True",
        GRAMMARS,
    ),
)
