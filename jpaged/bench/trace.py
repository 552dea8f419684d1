"""Times and token counts of one request, as seen by the client."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Trace:
    """One request as timed by its client, on the clock of `time.perf_counter`.

    Attributes:
        prompt_len: prompt tokens; from the data set until the server reports them.
        output_len: generated tokens, as counted by the server.
        queue_s: time that the request waited for `--max-concurrency` before it was sent.
        itls_s: gaps between consecutive messages with tokens.
        error: reason of the failure; empty on success.
    """

    prompt_len: int
    output_len: int = 0
    queue_s: float = 0.0
    start_s: float = 0.0
    first_s: float = 0.0
    end_s: float = 0.0
    itls_s: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Return the time from sending to the first token."""
        return self.first_s - self.start_s

    @property
    def e2el_s(self) -> float:
        """Return the time from sending to the last token."""
        return self.end_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Return the mean time per token after the first; None without a second one."""
        return (self.e2el_s - self.ttft_s) / (self.output_len - 1) if self.output_len > 1 else None

    def send(self) -> None:
        """Record that the request is being sent."""
        self.start_s = self.first_s = self.end_s = time.perf_counter()

    def receive(self, text: str) -> None:
        """Record a message with tokens."""
        now_s = time.perf_counter()
        if self.first_s == self.start_s:
            self.first_s = now_s
        else:
            self.itls_s.append(now_s - self.end_s)
        self.end_s = now_s
        self.text += text

    def count(self, prompt_len: int | None, output_len: int | None) -> None:
        """Set the server's counts; None keeps the current value."""
        self.prompt_len = self.prompt_len if prompt_len is None else prompt_len
        self.output_len = self.output_len if output_len is None else output_len

    def delay(self, queue_s: float) -> None:
        """Record the time that the request waited before it was sent."""
        self.queue_s = queue_s

    def fail(self, error: str) -> None:
        """Record the reason of the failure."""
        self.error = error
