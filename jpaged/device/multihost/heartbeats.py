"""Signs of life between processes: a host that is gone without a word leaves its connections open.

    this process   ── beat ── beat ── beat ──>  each other end, from a thread of its own for each
                   <─ beat ── step ── ...       whatever comes is a sign of life; silence is counted

Silence counts only while this process is awake itself: one that was stopped for long does not find that all others are
gone when it goes on. Threads wait in the system, so that steps, compilers and Python's collector hold no beat up that
they do not hold the whole interpreter up for.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from jpaged.config import ParallelOptions
from jpaged.device.multihost.channel import Channel, Kind


@dataclass(frozen=True, slots=True)
class HeartbeatTimes:
    """How often a sign of life is sent, and how long a silence is one of the dead."""

    interval_s: float
    timeout_s: float

    @classmethod
    def of(cls, options: ParallelOptions) -> HeartbeatTimes:
        """Return what the options say."""
        return cls(options.heartbeat_interval, options.heartbeat_timeout)

    @property
    def silence(self) -> str:
        """What is said of a process that is lost."""
        return f"nothing has come from it for {self.timeout_s:g} s (heartbeat_timeout)"


class Silences:
    """How long nothing has come from each of some processes, counted from look to look."""

    def __init__(self, processes: Iterable[int], times: HeartbeatTimes, now_s: float) -> None:
        self._times = times
        self._silent_s = dict.fromkeys(processes, 0.0)
        self._has_come = dict.fromkeys(self._silent_s, False)
        self._looked_s = now_s
        self._left: set[int] = set()

    def heard(self, process: int) -> None:
        """Notes that something has come; any thread may."""
        self._has_come[process] = True

    def leave(self, process: int) -> None:
        """Counts nothing any more for a process whose channel is closed; any thread may."""
        self._left.add(process)

    @property
    def is_over(self) -> bool:
        """Nobody is left to listen for."""
        return self._left.issuperset(self._silent_s)

    def look(self, now_s: float) -> list[int]:
        """Return who is lost by now, each once; time in which nobody looked is not that of a silence."""
        awake_s, self._looked_s = min(now_s - self._looked_s, self._times.interval_s), now_s
        for process in self._silent_s:
            self._silent_s[process] = 0.0 if self._has_come[process] else self._silent_s[process] + awake_s
            self._has_come[process] = False
        lost = [
            process
            for process, silent_s in self._silent_s.items()
            if silent_s >= self._times.timeout_s and process not in self._left
        ]
        for process in lost:
            del self._silent_s[process]
        return lost


class Heartbeats:
    """Sends signs of life to the other ends of some channels, and listens for theirs.

    Args:
        channels: by the process at the other end.
        on_silence: told, once for each on a thread of this, of a process from which nothing has come for too long. Its
            channel is not closed.
    """

    def __init__(
        self, channels: Mapping[int, Channel], times: HeartbeatTimes, on_silence: Callable[[int], None]
    ) -> None:
        self._interval_s = times.interval_s
        self._on_silence = on_silence
        self._silences = Silences(channels, times, time.monotonic())
        for process, channel in channels.items():
            threading.Thread(
                target=self._send, args=(process, channel), name=f"jpaged-beat-{process}", daemon=True
            ).start()
        threading.Thread(target=self._listen, name="jpaged-heartbeats", daemon=True).start()

    def heard(self, process: int) -> None:
        """Notes that something has come from a process."""
        self._silences.heard(process)

    def _send(self, process: int, channel: Channel) -> None:
        """Sends until the channel is closed, which whoever receives there sees to."""
        with contextlib.suppress(OSError):
            while True:
                channel.send(Kind.HEARTBEAT)
                time.sleep(self._interval_s)
        self._silences.leave(process)

    def _listen(self) -> None:
        while not self._silences.is_over:
            time.sleep(self._interval_s / 2)
            for process in self._silences.look(time.monotonic()):
                self._on_silence(process)
