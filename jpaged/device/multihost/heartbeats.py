"""Heartbeats between processes: a host that fails silently leaves its connections open.

    this process   ── beat ── beat ── beat ──>  each other end, on one thread per channel
                   <─ beat ── step ── ...       any message counts; silence is measured

Silence counts only while this process runs: after a long stop it does not find that all others are lost. The threads
block in the system, so steps, compilers and Python's garbage collector delay a beat only while they hold the GIL.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from jpaged.config import ParallelOptions
from jpaged.device.multihost.channel import Channel, MessageKind


@dataclass(frozen=True, slots=True)
class HeartbeatTimes:
    """Interval of heartbeats, and the silence after which a process is lost."""

    interval_s: float
    timeout_s: float

    @classmethod
    def of(cls, options: ParallelOptions) -> HeartbeatTimes:
        """Return the times of the options."""
        return cls(options.heartbeat_interval, options.heartbeat_timeout)

    @property
    def silence(self) -> str:
        """Error message for a lost process."""
        return f"no message for {self.timeout_s:g} s (heartbeat_timeout)"


class Silences:
    """Measures the silence of each of some processes, from look to look."""

    def __init__(self, processes: Iterable[int], times: HeartbeatTimes, now_s: float) -> None:
        self._times = times
        self._silent_s = dict.fromkeys(processes, 0.0)
        self._has_come = dict.fromkeys(self._silent_s, False)
        self._looked_s = now_s
        self._left: set[int] = set()

    def heard(self, process: int) -> None:
        """Record a message of a process; callable from any thread."""
        self._has_come[process] = True

    def leave(self, process: int) -> None:
        """Stop measuring a process whose channel is closed; callable from any thread."""
        self._left.add(process)

    @property
    def is_over(self) -> bool:
        """True if no process is left to listen to."""
        return self._left.issuperset(self._silent_s)

    def look(self, now_s: float) -> list[int]:
        """Return the processes lost by now, each once.

        Between two looks at most one interval counts, so that a pause of this process is no silence of the others.
        """
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
    """Sends heartbeats on some channels, and listens for those of the other ends.

    Args:
        channels: by the process at the other end.
        on_silence: called once for each process that was silent for too long, on this object's thread. Its channel is
            not closed.
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
        """Record a message of a process."""
        self._silences.heard(process)

    def _send(self, process: int, channel: Channel) -> None:
        """Send heartbeats until the channel is closed; the thread that receives closes it."""
        with contextlib.suppress(OSError):
            while True:
                channel.send(MessageKind.HEARTBEAT)
                time.sleep(self._interval_s)
        self._silences.leave(process)

    def _listen(self) -> None:
        while not self._silences.is_over:
            time.sleep(self._interval_s / 2)
            for process in self._silences.look(time.monotonic()):
                self._on_silence(process)
