"""A result as a table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from jpaged.bench.metrics import LATENCIES

_ROWS: Mapping[str, str] = {
    "completed": "requests that succeeded",
    "failed": "requests that failed",
    "num_requests": "requests",
    "num_steps": "steps",
    "duration": "seconds",
    "elapsed_time": "seconds",
    "total_input_tokens": "prompt tokens",
    "total_output_tokens": "generated tokens",
    "request_throughput": "requests/s",
    "requests_per_second": "requests/s",
    "request_goodput": "requests/s within the objectives (goodput)",
    "output_throughput": "generated tokens/s",
    "output_tokens_per_second": "generated tokens/s",
    "max_output_tokens_per_s": "peak messages per second",
    "total_token_throughput": "all tokens/s",
    "tokens_per_second": "all tokens/s",
    "max_concurrent_requests": "peak concurrent requests",
    "avg_latency": "mean batch latency, s",
    "std_latency": "standard deviation, s",
    "limit_seconds": "seconds at the machine's limit",
    "limit_tpot_ms": "time per output token at the machine's limit, ms",
    "mbu": "memory bandwidth utilization (MBU)",
    "mfu": "FLOP/s utilization (MFU)",
    "share_of_limit": "fraction of the machine's limit",
}
_SHARES = ("mbu", "mfu", "share_of_limit")


def print_result(console: Console, result: Mapping[str, Any], title: str, metrics: Sequence[str] = ()) -> None:
    """Print the numbers of a result, with latencies in a separate table."""
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    table.add_column("measured", justify="right")
    for key, words in _ROWS.items():
        if (value := result.get(key)) is not None:
            table.add_row(words, _text(key, value))
    console.print(table)
    if metrics:
        console.print(_latencies(result, metrics))
        legend = "; ".join(f"{name.upper()}: {LATENCIES[name]}" for name in metrics)
        console.print(legend, highlight=False)


def _latencies(result: Mapping[str, Any], metrics: Sequence[str]) -> Table:
    table = Table(title="milliseconds", title_justify="left")
    table.add_column("latency")
    words = [key.removesuffix(f"_{metrics[0]}_ms") for key in result if key.endswith(f"_{metrics[0]}_ms")]
    words = [word for word in words if f"{word}_{metrics[0]}_ms" in result and not word.startswith("limit")]
    for word in words:
        table.add_column(word, justify="right")
    for name in metrics:
        cells = [f"{result[f'{word}_{name}_ms']:.2f}" for word in words]
        table.add_row(name.upper(), *cells)
    return table


def _text(key: str, value: float) -> str:
    if key in _SHARES:
        return f"{100 * value:.1f} %"
    return f"{value}" if isinstance(value, int) else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
