"""The checks of a first run, most valuable first."""

from __future__ import annotations

from benchmarks.first_contact.driver import Check

_ROOM = "benchmarks.first_contact"

CHECKS: dict[str, Check] = {check.name: check for check in (Check("device", f"{_ROOM}.device:check", 15),)}
