"""Times and token counts of requests, as seen by the client, and metrics under the names of vLLM's benchmarks.

    TTFT    time to first token, from sending
    TPOT    time per output token after the first: (E2EL - TTFT) / (output tokens - 1), one value per request
    ITL     inter-token latency: the gap between two messages of a stream, one value per gap
    E2EL    end-to-end latency, from sending to the last token

Failed requests count only in `failed`. A request meets a goodput objective if all of the named times do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jpaged.errors import InvalidArgument


@dataclass(slots=True)
class Trace:
    """One request as timed by its client, on the clock of `time.perf_counter`.

    Attributes:
        prompt_len: prompt tokens; from the data set until the server reports them.
        output_len: generated tokens, as counted by the server.
        queue_s: time that the request waited for `--max-concurrency` before it was sent.
        itls_s: gaps between consecutive messages with tokens.
        token_ids: generated tokens, if the server returns them.
        turn: position in its conversation, from 0.
        cached_len: prompt tokens from the prefix cache; None if the server does not report them.
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
    token_ids: list[int] = field(default_factory=list)
    turn: int = 0
    cached_len: int | None = None

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

    def receive(self, text: str, token_ids: Sequence[int] = ()) -> None:
        """Record a message with tokens."""
        now_s = time.perf_counter()
        if self.first_s == self.start_s:
            self.first_s = now_s
        else:
            self.itls_s.append(now_s - self.end_s)
        self.end_s = now_s
        self.text += text
        self.token_ids += token_ids

    def count(self, prompt_len: int | None, output_len: int | None, cached_len: int | None = None) -> None:
        """Set the server's counts; None keeps the current value."""
        self.prompt_len = self.prompt_len if prompt_len is None else prompt_len
        self.output_len = self.output_len if output_len is None else output_len
        self.cached_len = self.cached_len if cached_len is None else cached_len

    def delay(self, queue_s: float) -> None:
        """Record the time that the request waited before it was sent."""
        self.queue_s = queue_s

    def fail(self, error: str) -> None:
        """Record the reason of the failure."""
        self.error = error


LATENCIES: Mapping[str, str] = {
    "ttft": "time to first token",
    "tpot": "time per output token (excl. 1st)",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
    "client_queue_time": "wait for --max-concurrency",
    "e2el_including_client_queue": "end-to-end latency and that wait",
}
OBJECTIVES = ("ttft", "tpot", "e2el")


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """Parse `ttft:200 tpot:50` into milliseconds by name.

    Raises:
        InvalidArgument: a word is not NAME:MILLISECONDS, or its name is not one of `OBJECTIVES`.
    """
    found = {}
    for word in words:
        name, colon, value = word.partition(":")
        milliseconds = as_number(value)
        if not colon or name not in OBJECTIVES or milliseconds is None or milliseconds < 0:
            names = ", ".join(OBJECTIVES)
            raise InvalidArgument("--goodput", f"{word!r} is not NAME:MILLISECONDS with one of {names} and from 0")
        found[name] = milliseconds
    return found


def parse_metrics(text: str) -> tuple[str, ...]:
    """Parse `ttft,tpot` into names, each one of `LATENCIES`.

    Raises:
        InvalidArgument: a name is unknown.
    """
    names = tuple(text.split(","))
    for name in names:
        if name not in LATENCIES:
            raise InvalidArgument("--percentile-metrics", f"{name!r} is not one of {', '.join(LATENCIES)}")
    return names


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Parse `50,99` into numbers from 0 to 100.

    Raises:
        InvalidArgument: a word is not such a number.
    """
    values = [as_number(word) for word in text.split(",")]
    for word, value in zip(text.split(","), values, strict=True):
        if value is None or not 0 <= value <= 100:
            raise InvalidArgument("--metric-percentiles", f"{word!r} is not a number from 0 to 100")
    return tuple(value for value in values if value is not None)


def as_number(word: str) -> float | None:
    """Return the finite number that a word represents, or None."""
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def times_ms(traces: Sequence[Trace]) -> dict[str, np.ndarray]:
    """Return all times of the successful requests, in milliseconds, by the names of `LATENCIES`."""
    good = [trace for trace in traces if not trace.error]
    tpots = [trace.tpot_s for trace in good]
    seconds = {
        "ttft": [trace.ttft_s for trace in good],
        "tpot": [tpot for tpot in tpots if tpot is not None],
        "itl": [itl for trace in good for itl in trace.itls_s],
        "e2el": [trace.e2el_s for trace in good],
        "client_queue_time": [trace.queue_s for trace in good],
        "e2el_including_client_queue": [trace.queue_s + trace.e2el_s for trace in good],
    }
    return {name: 1e3 * np.array(values, np.float64) for name, values in seconds.items()}


def percentile_key(percentile: float) -> str:
    """Return the part of a key that names a percentile: 99.0 -> p99, 99.9 -> p99.9."""
    return f"p{int(percentile)}" if float(percentile).is_integer() else f"p{percentile}"


def latency_keys(name: str, values_ms: np.ndarray, percentiles: Sequence[float]) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles of one kind of times; all 0 if there are none."""
    values = values_ms if values_ms.size else np.zeros(1)
    found = {
        f"mean_{name}_ms": float(np.mean(values)),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(np.std(values)),
    }
    for percentile in percentiles:
        found[f"{percentile_key(percentile)}_{name}_ms"] = float(np.percentile(values, percentile))
    return found


def summarize(
    traces: Sequence[Trace],
    duration_s: float,
    *,
    metrics: Sequence[str] = ("ttft", "tpot", "itl"),
    percentiles: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the metrics of a run.

    Args:
        traces: all requests, in the order of the data set.
        duration_s: from the first send time to the last response.
        metrics: latencies to include.
        percentiles: from 0 to 100.
        goodput: objectives in milliseconds, by the names of `OBJECTIVES`.
    """
    good = [trace for trace in traces if not trace.error]
    num_input, num_output = sum(trace.prompt_len for trace in good), sum(trace.output_len for trace in good)
    num_met = sum(_meets(trace, goodput or {}) for trace in good)
    peak_tokens, peak_requests = _peaks(good)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(traces) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "request_goodput": num_met / duration_s if goodput else None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
    }
    times = times_ms(traces)
    for name in metrics:
        result |= latency_keys(name, times[name], percentiles)
    result |= cached_keys(traces)
    if turns := turn_table(traces, percentiles):
        result["turns"] = turns
    return result


def cached_keys(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return the prompt tokens from the prefix cache and their share; empty if the server reports none."""
    good = [trace for trace in traces if not trace.error]
    known = [trace.cached_len for trace in good if trace.cached_len is not None]
    num_input = sum(trace.prompt_len for trace in good)
    if not known or not num_input:
        return {}
    return {"total_cached_tokens": sum(known), "cached_share": sum(known) / num_input}


def turn_table(traces: Sequence[Trace], percentiles: Sequence[float] = (99.0,)) -> list[dict[str, Any]]:
    """Return the metrics of each turn of the conversations, the first turn first; empty without later turns.

    `mean_computed_tokens` is the cost of a turn: prompt tokens that were not cached, and generated tokens.
    """
    num_turns = 1 + max((trace.turn for trace in traces), default=0)
    rows = []
    for turn in range(num_turns if num_turns > 1 else 0):
        every = [trace for trace in traces if trace.turn == turn]
        good = [trace for trace in every if not trace.error]
        row: dict[str, Any] = {"turn": turn + 1, "completed": len(good), "failed": len(every) - len(good)}
        if good:
            row["mean_input_tokens"] = float(np.mean([trace.prompt_len for trace in good]))
            row["mean_output_tokens"] = float(np.mean([trace.output_len for trace in good]))
            if cached := cached_keys(good):
                row["cached_share"] = cached["cached_share"]
                new = [trace.prompt_len - (trace.cached_len or 0) + trace.output_len for trace in good]
                row["mean_computed_tokens"] = float(np.mean(new))
            times = times_ms(good)
            row |= latency_keys("ttft", times["ttft"], percentiles) | latency_keys("e2el", times["e2el"], percentiles)
        rows.append(row)
    return rows


def details(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return the data per request for `--save-detailed`; times in seconds."""
    found: dict[str, Any] = {}
    if any(trace.turn for trace in traces):
        found["request_turns"] = [trace.turn + 1 for trace in traces]
    if any(trace.cached_len for trace in traces):
        found["cached_lens"] = [trace.cached_len for trace in traces]
    return found | {
        "input_lens": [trace.prompt_len for trace in traces],
        "output_lens": [trace.output_len for trace in traces],
        "ttfts": [trace.ttft_s for trace in traces],
        "itls": [trace.itls_s for trace in traces],
        "latencies": [trace.e2el_s for trace in traces],
        "start_times": [trace.start_s for trace in traces],
        "queue_times": [trace.queue_s for trace in traces],
        "generated_texts": [trace.text for trace in traces],
        "errors": [trace.error for trace in traces],
    }


def _meets(trace: Trace, goodput: Mapping[str, float]) -> bool:
    """Return True if a request meets the objectives; one with a single token meets any TPOT objective."""
    times = {"ttft": trace.ttft_s, "tpot": trace.tpot_s or 0.0, "e2el": trace.e2el_s}
    return all(1e3 * times[name] <= limit_ms for name, limit_ms in goodput.items())


def _peaks(good: Sequence[Trace]) -> tuple[float, int]:
    """Return the peak number of messages with tokens in one second of the run, and of concurrent requests."""
    if not good:
        return 0.0, 0
    start_s = min(trace.start_s for trace in good)
    arrivals = np.concatenate([trace.first_s + np.cumsum([0.0, *trace.itls_s]) for trace in good]) - start_s
    tokens = np.bincount(arrivals.astype(np.int64))
    # At equal times, ends count before starts.
    events = sorted([(trace.start_s, 1) for trace in good] + [(trace.end_s, -1) for trace in good])
    running = np.cumsum([change for _, change in events])
    return float(tokens.max()), int(running.max())
