"""Python's garbage collector, kept out of the critical path of the steps.

    automatic   after every 700 new objects, at any point, and now and then a full collection of the process: 0.2 s
    here        disabled while a loop runs; the loop collects young objects once there are enough of them, right after
                a dispatch, and everything after each _MAX_LOOKS of those; objects that a server has loaded at its
                start (`cli/serve.py`) are frozen

Collecting by the number of new objects, and not by time, bounds the size of garbage.
"""

from __future__ import annotations

import gc
import threading

_MAX_NEW = 50_000
"""Container objects created since the last collection: a few MB, and a few ms to collect if all of them are alive."""
_MAX_LOOKS = 50
"""Collections of young objects between two full collections."""


class CollectorPause:
    """Context manager that disables automatic collection for the whole process while any thread is inside it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._was_enabled = True

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._num_inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside and self._was_enabled:
                gc.enable()


collected_between_steps = CollectorPause()
"""For loops that call `collect_if_due` at every step."""


def collect_if_due() -> None:
    """Collect garbage if there are enough new objects; call it right after a dispatch."""
    num_new, _, num_looks = gc.get_count()
    if num_new > _MAX_NEW:
        gc.collect(2 if num_looks >= _MAX_LOOKS else 1)
