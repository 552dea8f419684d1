"""Faults of steps that are given masks while they are under way."""

from __future__ import annotations

from tests.mutation.planting import Fault

GRAMMARS = ("test_grammars.py",)

FEED_FAULTS = (
    Fault(
        "grammars move over tokens again when those are taken in",
        "intake.py",
        "None if schedule.decodes.is_fed else going_on",
        "going_on",
        GRAMMARS,
    ),
    Fault(
        "steps are fed on when a row has ended",
        "turns.py",
        "verdict = Verdict.GOES_ON if are_live and self.all_go_on else Verdict.LAST",
        "verdict = Verdict.GOES_ON",
        GRAMMARS,
    ),
    Fault(
        "a dispatch that was cut short counts as whole",
        "turns.py",
        "self.scheduler.has_made(fed.schedule, num_steps)",
        "self.scheduler.has_made(fed.schedule, fed.schedule.num_steps)",
        GRAMMARS,
    ),
    Fault(
        "a grammar that fails on the way is fed on",
        "grammars.py",
        "return is_sound and bool(num_words_r.all())",
        "return True",
        GRAMMARS,
    ),
    Fault(
        "steps are fed before what came before is taken in",
        "loop.py",
        "                self._collect_earlier()\n                started, may_go_on",
        "                started, may_go_on",
        GRAMMARS,
    ),
    Fault(
        "what the last step gave is not followed",
        "turns.py",
        "        if not self.are_over:\n            self._take()\n",
        "        if not self.are_over:\n            self._columns.append(self.fed.feed.wait())\n",
        GRAMMARS,
    ),
    Fault(
        "a row that has ended before is fed beside the others to their end",
        "turns.py",
        "are_live = all(one.is_live for one in schedule.sequences)",
        "are_live = True",
        GRAMMARS,
    ),
)
