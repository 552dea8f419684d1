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
        "verdict = Verdict.GOES_ON if go_on else Verdict.LAST",
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
        "return bool(num_words_r.all()) and all(bound.state.failure is None for bound in rows)",
        "return True",
        GRAMMARS,
    ),
    Fault(
        "the next dispatch is decided before it is known who has ended",
        "loop.py",
        "not (all_go_on and self._overlap)",
        "not self._overlap",
        GRAMMARS,
    ),
    Fault(
        "steps are fed before what came before is taken in",
        "loop.py",
        "                self._collect_earlier()\n                started, all_go_on",
        "                started, all_go_on",
        GRAMMARS,
    ),
)
