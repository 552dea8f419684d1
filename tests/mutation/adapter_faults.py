"""Faults of adapters and grammars: whose slot it is, what is found of others, masks that come while steps run."""

from __future__ import annotations

from tests.mutation.planting import Fault

ADAPTERS = ("test_adapters.py",)
GRAMMARS = ("test_grammars.py",)

ADAPTER_FAULTS = (
    Fault(
        "adapters share cached prefixes",
        "sequence.py",
        "request.cache_tenant, adapter_digest, weights)",
        'request.cache_tenant, b"", weights)',
        ADAPTERS,
    ),
    Fault(
        "the replica router matches prefixes of other adapters",
        "data_parallel.py",
        "request.cache_tenant, request.adapter_digest, weights)",
        'request.cache_tenant, b"", weights)',
        ADAPTERS,
    ),
    Fault(
        "a LoRA slot in use is overwritten",
        "lora.py",
        "        self._free.pop(slot, None)\n",
        "",
        ADAPTERS,
    ),
    Fault(
        "the most recently used LoRA slot is overwritten first",
        "lora.py",
        "slot = next(iter(self._free))",
        "slot = list(self._free)[-1]",
        ADAPTERS,
    ),
    Fault(
        "a preempted group does not release its LoRA slot",
        "scheduler/scheduler.py",
        "            self.adapters.give_back(group)\n        group.preempted()\n",
        "            pass\n        group.preempted()\n",
        ADAPTERS,
    ),
    Fault(
        "a finished group does not release its LoRA slot",
        "scheduler/scheduler.py",
        "            self.adapters.give_back(group)\n        for sequence",
        "            pass\n        for sequence",
        ADAPTERS,
    ),
    Fault(
        "a moved row keeps the LoRA slot of the removed row",
        "scheduler/decode_batch.py",
        "            self._adapters_s,\n",
        "",
        ADAPTERS,
    ),
    Fault(
        "reordered rows use the LoRA slots of other rows",
        "scheduler/output.py",
        "        slots = slots[schedule.order] if schedule.order else slots\n",
        "",
        ADAPTERS,
    ),
    Fault(
        "a group without a LoRA slot is preempted to free one",
        "lora.py",
        "if adapter is None or self.can_take(adapter):\n",
        "if True:\n",
        ADAPTERS,
    ),
    Fault(
        "a group is admitted although every LoRA slot is in use",
        "scheduler/scheduler.py",
        "not self.adapters.can_take(group.request.adapter)",
        "False",
        ADAPTERS,
    ),
)

FEED_FAULTS = (
    Fault(
        "grammars advance twice over tokens of a masked dispatch",
        "results.py",
        "follows = schedule.has_grammars and kind is not StepKind.MASKED_MULTI_STEP",
        "follows = schedule.has_grammars",
        GRAMMARS,
    ),
    Fault(
        "a masked dispatch continues after a row has ended",
        "runners.py",
        "directive = StepDirective.CONTINUE if are_live and self.all_continue else StepDirective.LAST",
        "directive = StepDirective.CONTINUE",
        GRAMMARS,
    ),
    Fault(
        "a dispatch that ended early counts as complete",
        "runners.py",
        "context.scheduler.truncate_steps(schedule, steps.serve())",
        "steps.serve()",
        GRAMMARS,
    ),
    Fault(
        "a masked dispatch continues after a grammar has failed",
        "structured_output.py",
        "return is_sound and bool(num_words_r.all())",
        "return True",
        GRAMMARS,
    ),
    Fault(
        "masks are sent before the previous step is processed",
        "runners.py",
        "            self._send_first_masks(steps)\n            context.finish_in_flight()\n",
        "            self._send_first_masks(steps)\n",
        GRAMMARS,
    ),
    Fault(
        "grammars do not advance over a masked dispatch's last tokens",
        "runners.py",
        "        if not self.is_done:\n            self._take()\n",
        "        if not self.is_done:\n            self._columns.append(self._feed.wait())\n",
        GRAMMARS,
    ),
    Fault(
        "a masked dispatch continues although a row had ended before it",
        "runners.py",
        "are_live = all(one.is_live for one in schedule.sequences)",
        "are_live = True",
        GRAMMARS,
    ),
)
