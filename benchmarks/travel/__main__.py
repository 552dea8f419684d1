"""Time to the first token of a prompt that another server has computed: `python -m benchmarks.travel`.

computed   the server computes all of it
fetched    FetchPrefix from the other server, and then the request; both together are the time to its first token

Every prompt is new. Streams run at the server that fetches, and the gaps between their messages are compared: alone,
beside fetches, and beside prompts that are computed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.checkpoints import SHAPES, make
from benchmarks.record import put_on_page, save
from benchmarks.travel.servers import Streams, free_port, serving
from jpaged.client import Client
from jpaged.types import SamplingParams

MODEL = "S"
LENGTHS = (1000, 2000, 4000)
_OPTIONS = ("--max-num-seqs", "16", "--num-blocks", "4096", "--swap-space", "0.5")
_NUM_STREAMS, _STREAM_TOKENS = 4, 256
_FIRST = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class Measurement:
    """Two servers and the prompts that they have not seen."""

    def __init__(self, there: Client, source: str, here: Client, seed: int) -> None:
        self._there, self._source, self._here = there, source, here
        self._random = random.Random(seed)

    def prompt(self, length: int) -> list[int]:
        """Token ids that nobody has asked for."""
        return [self._random.randrange(3, SHAPES[MODEL].vocab_size) for _ in range(length)]

    def computed(self, length: int) -> dict[str, float]:
        """Seconds to the first token of a prompt that is computed."""
        prompt, begin_s = self.prompt(length), time.perf_counter()
        self._here.complete(prompt_token_ids=prompt, sampling=_FIRST)
        return {"begin_s": begin_s, "ttft_s": time.perf_counter() - begin_s}

    def fetched(self, length: int) -> dict[str, float]:
        """Seconds to the first token of one that the other server has, and how many of them the fetch took."""
        prompt = self.prompt(length)
        there = self._there.complete(prompt_token_ids=prompt, sampling=_FIRST)
        begin_s = time.perf_counter()
        arrival = self._here.prefixes.fetch(self._source, prompt_token_ids=prompt)
        fetched_s = time.perf_counter() - begin_s
        here = self._here.complete(prompt_token_ids=prompt, sampling=_FIRST)
        ttft_s = time.perf_counter() - begin_s
        num_cached = here.usage.cached_tokens
        if num_cached < length - 32 or here.outputs[0].token_ids != there.outputs[0].token_ids:
            raise RuntimeError(f"{num_cached} of {length} tokens were found, {arrival}; or other tokens came")
        return {"begin_s": begin_s, "ttft_s": ttft_s, "fetch_s": fetched_s}


def median_of(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each number, but for when it began."""
    names = [name for name in rounds[0] if name != "begin_s"]
    return {name: statistics.median(one[name] for one in rounds) for name in names}


def gaps(
    streamed: Client, measurement: Measurement, act: Callable[[int], dict[str, float]] | None, num_rounds: int
) -> dict[str, float]:
    """Gaps of streams at a server while something is done again and again; None is nothing."""
    prompts = [measurement.prompt(64) for _ in range(_NUM_STREAMS)]
    with Streams(streamed, prompts, _STREAM_TOKENS) as streams:
        time.sleep(3.0)
        seen: list[float] = []
        for _ in range(num_rounds):
            begin_s = time.perf_counter()
            if act is None:
                time.sleep(2.0)
            else:
                begin_s = act(4000)["begin_s"]
            seen += streams.gaps_ms(begin_s, time.perf_counter())
    seen.sort()
    return {"num": len(seen), "p50_ms": _at(seen, 0.5), "p99_ms": _at(seen, 0.99), "max_ms": seen[-1]}


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(home: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Every number, with servers of their own."""
    model = home / MODEL
    make(SHAPES[MODEL], model)
    cores = options.cores if options.cores else [None, None]
    ports = free_port(), free_port()
    source = f"127.0.0.1:{ports[0]}"
    with (
        serving(model, ports[0], home / "there.log", cores[0], _OPTIONS) as there,
        serving(model, ports[1], home / "here.log", cores[1], (*_OPTIONS, "--prefix-peers", source)) as here,
    ):
        measurement = Measurement(there, source, here, options.seed)
        for act in (measurement.computed, measurement.fetched):  # what comes first reads weights and warms up
            act(1000)
        lengths = {
            str(length): {
                "computed": median_of([measurement.computed(length) for _ in range(options.rounds)]),
                "fetched": median_of([measurement.fetched(length) for _ in range(options.rounds)]),
            }
            for length in options.lengths
        }
        streams = {
            "here": {
                "alone": gaps(here, measurement, None, options.rounds),
                "fetched": gaps(here, measurement, measurement.fetched, options.rounds),
                "computed": gaps(here, measurement, measurement.computed, options.rounds),
            },
        }
    return {"bytes_per_token": _bytes_per_token(), "lengths": lengths, "streams": streams}


def _bytes_per_token() -> int:
    shape = SHAPES[MODEL]
    return shape.num_layers * 2 * shape.num_kv_heads * 64 * 4


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = ["| prompt | computed | fetched and begun | of that the fetch | sooner |", "|---|---|---|---|---|"]
    for length, ways in results["lengths"].items():
        computed_s, fetched = ways["computed"]["ttft_s"], ways["fetched"]
        mib = int(length) * results["bytes_per_token"] / 2**20
        lines.append(
            f"| {length} tokens, {mib:.0f} MiB | {computed_s:.2f} s | {fetched['ttft_s']:.2f} s | "
            f"{fetched['fetch_s']:.2f} s | {computed_s / fetched['ttft_s']:.1f} x |"
        )
    lines += ["", f"| gaps of {_NUM_STREAMS} streams | median | 99 % | most |", "|---|---|---|---|"]
    for name, told in (
        ("alone", "nothing else"),
        ("fetched", "prompts of 4000 tokens come from the other server"),
        ("computed", "such prompts are computed"),
    ):
        one = results["streams"]["here"][name]
        lines.append(f"| {told} | {one['p50_ms']:.0f} ms | {one['p99_ms']:.0f} ms | {one['max_ms']:.0f} ms |")
    return "\n".join(lines)


def main() -> None:
    """Measures, and keeps what came of it where that is asked for."""
    parser = argparse.ArgumentParser(description="A prompt whose prefix another server has.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[*LENGTHS], help="tokens of prompts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cores", type=int, nargs=2, help="a core for each server; any when left out")
    parser.add_argument("--record", action="store_true", help="write results/travel.json and docs/performance.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), options)
    print(table(results))
    if options.record:
        save("travel", "python -m benchmarks.travel --record", results)
        put_on_page({"travel": table(results)})


if __name__ == "__main__":
    main()
