"""The thread of a loop: steps, and between them what other threads ask for."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from jpaged.engine.loop import EngineLoop
from jpaged.errors import InternalError, Unavailable

logger = logging.getLogger(__name__)

_ABANDONED_JOIN_S = 1.0
"""For a loop that may hang in its executor."""


class LoopThread:
    """Runs a loop until it is stopped or fails; without `start` whoever calls `step` is the thread."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_stopping = False
        self._is_abandoned = False
        self._thread: threading.Thread | None = None
        self._on_failure: Callable[[Exception], None] = _ignore

    def ask(self, command: Callable[[], None]) -> None:
        """Has something done on the loop's thread before its next step; any thread may ask."""
        self._inbox.put(command)

    def start(self, on_failure: Callable[[Exception], None] | None) -> None:
        """Makes the thread.

        Args:
            on_failure: told, on that thread, what ended the loop; by then nothing is accepted any more.
        """
        self._on_failure = on_failure or _ignore
        self._thread = threading.Thread(target=self._run, name="jpaged-engine", daemon=True)
        self._thread.start()

    def step(self) -> bool:
        """Does what was asked for, and one iteration of the loop."""
        self._drain_inbox()
        return self._loop.step()

    def fail(self, error: Exception, *, hangs: bool) -> None:
        """Ends the loop as a fault of its own would; if it hangs, `stop` does not wait for it."""
        self._is_abandoned = self._is_abandoned or hangs
        self.ask(lambda: self._give_up(error))

    def stop(self) -> bool:
        """Ends the loop and what it has in flight; False when it hangs, and what it holds is left to it."""
        self.ask(self._set_stopping)
        if self._thread is not None:
            self._thread.join(_ABANDONED_JOIN_S if self._is_abandoned else None)
            if self._thread.is_alive():
                return False
        self._end(Unavailable("the server is shutting down"))
        return True

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                if not self.step() and not self._is_stopping:  # which the step may have read from the inbox
                    self._loop.check()
                    self._inbox.get()()
        except Unavailable as error:  # from outside, or of several processes one is lost: nothing here went wrong
            self._fail(error)
        except Exception as error:  # the top of the loop: whatever happened, every stream must hear of it
            logger.exception("the engine failed")
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._loop.in_flight.close(error)
        self._on_failure(error)
        if not isinstance(error, InternalError | Unavailable):
            failure = InternalError(f"the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            error = failure
        self._end(error)

    def _end(self, error: Exception) -> None:
        self._drain_inbox()
        self._loop.fail_all(error)

    def _drain_inbox(self) -> None:
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            command()

    def _set_stopping(self) -> None:
        self._is_stopping = True

    def _give_up(self, error: Exception) -> None:
        if self._loop.in_flight.failure is None and not self._is_stopping:
            raise error


def _ignore(error: Exception) -> None:
    """Nobody wants to hear of it."""
