"""Counters of the roles, updated on the event loop and readable from any thread."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter

from jpaged.load import RoleLoad

_LOG = logging.getLogger(__name__)
_QUIET_S = 10.0


class RoleCounts:
    """The counters of one server.

    Attributes:
        num_here: prompts that a decode server computed itself by the rule, per reason.
        num_failed: prompts that it computed itself, entirely or partly, because of a failure, per reason.
    """

    def __init__(self) -> None:
        self.num_here: Counter[str] = Counter()
        self.num_failed: Counter[str] = Counter()
        self._load = RoleLoad()
        self._quiet_until_s: dict[str, float] = {}

    def load(self) -> RoleLoad:
        """Return a snapshot."""
        return self._load

    def here(self, reason: str) -> None:
        """Count a prompt that the rule assigns to this server."""
        self.num_here[reason] += 1

    def failed(self, reason: str, error: BaseException) -> None:
        """Count a prompt that is (partly) computed here after a failure; log each reason at a limited rate."""
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
