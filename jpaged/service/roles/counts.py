"""What roles have done, counted on the event loop and read by whoever wants to know."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter

from jpaged.load import RoleLoad

_LOG = logging.getLogger(__name__)
_QUIET_S = 10.0


class RoleCounts:
    """The counts of one server.

    Attributes:
        num_here: prompts that a decode server computed itself, by the rule, by reasons.
        num_failed: prompts that it computed itself, or in part, because of a failure, by reasons.
    """

    def __init__(self) -> None:
        self.num_here: Counter[str] = Counter()
        self.num_failed: Counter[str] = Counter()
        self._load = RoleLoad()
        self._quiet_until_s: dict[str, float] = {}

    def load(self) -> RoleLoad:
        """A snapshot."""
        return self._load

    def here(self, reason: str) -> None:
        """Count a prompt that is computed here by the rule."""
        self.num_here[reason] += 1

    def failed(self, reason: str, error: BaseException) -> None:
        """Count a prompt of which something is computed here again, and log it, each reason now and then."""
        self.num_failed[reason] += 1
        now_s = time.monotonic()
        if now_s >= self._quiet_until_s.get(reason, 0.0):
            self._quiet_until_s[reason] = now_s + _QUIET_S
            what = str(error) or type(error).__name__
            _LOG.warning(
                "remote %s failed, prompt computed locally (%d so far): %s", reason, self.num_failed[reason], what
            )

    def add(self, **counts: float) -> None:
        """Add to counters, by their names in `RoleLoad`."""
        now = {name: getattr(self._load, name) + count for name, count in counts.items()}
        self._load = dataclasses.replace(self._load, **now)
