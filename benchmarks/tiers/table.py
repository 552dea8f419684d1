"""What was measured of the tiers, in Markdown: medians over seeds, and behind ± half of their range."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

WAYS = {
    "computed": "nowhere: it is computed",
    "host": "in host memory",
    "disk_warm": "on disk, after a restart; the page cache has it",
    "disk_cold": "on disk, after a restart; the page cache has been dropped",
}
STATES = {
    "alone": "nothing else happens",
    "disk_cold": "prompts come back from disk, none of it in the page cache",
    "computed": "such prompts are computed",
}


def tables(length: int, num_bytes: int, seeds: Mapping[str, Any]) -> str:
    """Times to the first token, and gaps of running streams.

    Args:
        length, num_bytes: of a prompt: its tokens, and what its blocks hold.
        seeds: what each measured: a list of rounds for each of WAYS, and that and gaps for each of STATES.
    """
    firsts = [one["first"] for one in seeds.values()]
    streams = [one["streams"] for one in seeds.values()]
    lines = [
        f"| where {length} tokens are, {num_bytes / 2**20:.0f} MiB | first token | sooner | tokens found, at least |",
        "|---|---|---|---|",
    ]
    computed_s = _median([_of(one["computed"], "ttft_s") for one in firsts])
    for way, told in WAYS.items():
        values_s = [_of(one[way], "ttft_s") for one in firsts]
        sooner = "" if way == "computed" else f"{computed_s / _median(values_s):.1f} x"
        num_found = min(round_["cached_tokens"] for one in firsts for round_ in one[way])
        lines.append(f"| {told} | {_spread(values_s, 3)} s | {sooner} | {num_found} |")
    lines += ["", "| while | gaps of streams: median | 99 % | longest | first token of the prompt |"]
    lines += ["|---|---|---|---|---|"]
    for state, told in STATES.items():
        texts = [
            _spread([one[state]["gaps"][name] for one in streams], 1) + " ms" for name in ("p50_ms", "p99_ms", "max_ms")
        ]
        values_s = [] if state == "alone" else [_of(one[state]["first"], "ttft_s") for one in streams]
        texts.append(f"{_spread(values_s, 2)} s" if values_s else "")
        lines.append(f"| {told} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _of(rounds: list[dict[str, float]], name: str) -> float:
    """A seed's number: the median of its rounds."""
    return _median([one[name] for one in rounds])


def _median(values: list[float]) -> float:
    return statistics.median(values)


def _spread(values: list[float], num_digits: int) -> str:
    half = (max(values) - min(values)) / 2
    return f"{_median(values):.{num_digits}f} ± {half:.{num_digits}f}"
