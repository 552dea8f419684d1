"""Keeps Python's garbage collector out of the steps: it looks where nobody waits for it, and at little.

    automatic   whenever 700 objects are new, wherever that is, and now and then at every object of the process: 0.2 s
    here        off while a loop runs; the loop collects what is new when enough is, just after it has given the device
                a step, and all of it every so often; what a server has loaded (`cli/serve.py`) is not looked at again

Collecting by how much is new, and not by time, bounds what garbage can grow to.
"""

from __future__ import annotations

import gc
import threading

_MAX_NEW = 50_000
"""Objects that can hold others, new since the last look: a few MB, and a few ms when all of them live on."""
_MAX_LOOKS = 50
"""Looks at what is new between two at everything."""


class CollectorPause:
    """A context in which nothing is collected automatically, in the whole process, while any thread is in it."""

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
    """Collects when enough is new; for a loop that has just given the device something to do."""
    num_new, _, num_looks = gc.get_count()
    if num_new > _MAX_NEW:
        gc.collect(2 if num_looks >= _MAX_LOOKS else 1)
