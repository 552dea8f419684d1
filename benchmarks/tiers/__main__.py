"""Time to first token of a prompt by the tier that has it, and what running streams notice of prompts from disk.

    a server computes prompts ── SIGTERM ── the next one finds them on disk ── rounds of all ways, in turns

Each seed has prompts and two lives of a server of its own. In a round a new prompt is computed, one comes back from
disk with the page cache filled, one with the page cache dropped, and then the first again from host memory, out of
which the other two have pushed it. Behind these rounds streams run, and the gaps between their messages are taken
while nothing else happens, while a prompt comes back from disk, and while one is computed. A seed that is recorded
already, with the same numbers asked for, is not measured again.

    taskset -c 0 python -m benchmarks.tiers [--seeds 3] [--rounds 4] [--length 4000] [--record] [--anew]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.checkpoints import HEAD_DIM, SHAPES, make
from benchmarks.record import RESULTS, put_on_page, save
from benchmarks.tiers.pages import drop, warm
from benchmarks.tiers.server import MODEL, First, Life, Prompt, living, num_findable, pool_blocks, prompts
from benchmarks.tiers.table import STATES, WAYS, tables
from benchmarks.travel.servers import Streams

NAME = "tiers"
_STREAM_PROMPT, _STREAM_TOKENS = 64, 320
_ALONE_S, _SETTLED_S = 2.0, 1.0


def measure(home: Path, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """What one seed measures: rounds of each way, and of each state of streams."""
    folder = Path(tempfile.mkdtemp(prefix="kv", dir=home))
    new = prompts(seed, options.length)
    with living(home, folder, options.num_blocks, options.core) as life:
        asked = [life.ask(next(new))[0] for _ in range(1 + 3 * options.rounds)]
        life.settle()
    kept = iter(asked)
    with living(home, folder, options.num_blocks, options.core) as life:
        for prompt in (next(kept), next(new)):  # what comes first reads weights and starts threads
            life.ask(prompt)
        first: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for number in range(options.rounds):
            for way, one in _round(life, kept, new, number):
                first[way].append(_checked(way, one, options.length))
        streams = _beside_streams(life, kept, new, options)
    return {"first": first, "streams": streams}


def _round(life: Life, kept: Iterator[Prompt], new: Iterator[Prompt], number: int) -> Iterator[tuple[str, First]]:
    """Every way once; which of the two from disk is the first changes from round to round."""
    life.settle()
    prompt, one = life.ask(next(new))
    yield "computed", one
    for way in ("disk_cold", "disk_warm") if number % 2 else ("disk_warm", "disk_cold"):
        life.settle()
        yield way, _from_disk(life, next(kept), way)
    life.settle()
    yield "host", life.ask(prompt)[1]


def _from_disk(life: Life, prompt: Prompt, way: str) -> First:
    if way == "disk_cold":
        drop(life.folder)
    else:
        warm(life.folder)
    return life.ask(prompt)[1]


def _checked(way: str, first: First, length: int) -> dict[str, float]:
    """The numbers of a first token, whose prompt has come from where it should.

    Raises:
        RuntimeError: it has not.
    """
    cached = {"computed": 0, "host": first.host_tokens}.get(way, first.disk_tokens)
    if first.cached_tokens != cached or (way != "computed" and cached < num_findable(length) // 2):
        raise RuntimeError(f"{way}: {first}, of {num_findable(length)} tokens that could be found")
    return asdict(first)


def _beside_streams(
    life: Life, kept: Iterator[Prompt], new: Iterator[Prompt], options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Gaps of running streams in each state, of all rounds together; states take turns."""
    first: dict[str, list[dict[str, float]]] = {state: [] for state in STATES}
    gaps_ms: dict[str, list[float]] = {state: [] for state in STATES}
    told = [list(next(new).token_ids[:_STREAM_PROMPT]) for _ in range(options.streams)]
    with Streams(life.client, told, _STREAM_TOKENS) as streams:
        for _ in range(options.rounds):
            for state in STATES:
                time.sleep(_SETTLED_S)
                begin_s = time.perf_counter()
                if state == "alone":
                    time.sleep(_ALONE_S)
                    gaps_ms[state] += streams.gaps_ms(begin_s, time.perf_counter())
                    continue
                one = _from_disk(life, next(kept), state) if state == "disk_cold" else life.ask(next(new))[1]
                first[state].append(asdict(one))
                gaps_ms[state] += streams.gaps_ms(one.begin_s, one.begin_s + one.ttft_s)
    return {state: {"first": first[state], "gaps": _gaps(gaps_ms[state])} for state in STATES}


def _gaps(gaps_ms: list[float]) -> dict[str, float]:
    gaps_ms.sort()
    if not gaps_ms:
        raise RuntimeError("no stream got a token meanwhile")
    at_99 = gaps_ms[min(len(gaps_ms) - 1, int(0.99 * len(gaps_ms)))]
    return {"num_gaps": len(gaps_ms), "p50_ms": gaps_ms[len(gaps_ms) // 2], "p99_ms": at_99, "max_ms": gaps_ms[-1]}


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    return {"model": MODEL, **{name: getattr(options, name) for name in ("length", "rounds", "streams", "core")}}


def _recorded(options: argparse.Namespace) -> dict[str, Any]:
    """Seeds that are measured already, with the same numbers asked for."""
    path = RESULTS / f"{NAME}.json"
    if options.anew or not options.record or not path.exists():
        return {}
    record = json.loads(path.read_text())
    return dict(record["seeds"]) if record["asked"] == _asked(options) else {}


def _bytes(length: int) -> int:
    shape = SHAPES[MODEL]
    return length * shape.num_layers * 2 * shape.num_kv_heads * HEAD_DIM * shape.bytes_per_value


def main() -> None:
    """Measures what is not recorded, and records it where that is asked for."""
    options = _options()
    seeds, began_s = _recorded(options), time.perf_counter()
    command = f"python -m benchmarks.tiers --seeds {options.seeds} --rounds {options.rounds} --record"
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        make(SHAPES[MODEL], Path(folder) / MODEL)
        for seed in range(options.seeds):
            if str(seed) in seeds:
                continue
            seeds[str(seed)] = measure(Path(folder), options, seed)
            print(f"{time.perf_counter() - began_s:7.1f} s  seed {seed}: {seeds[str(seed)]}", flush=True)
            if options.record:
                save(NAME, command, {"asked": _asked(options), "note": options.note, "seeds": seeds})
    text = tables(options.length, _bytes(options.length), seeds)
    print(text)
    if options.record:
        put_on_page({NAME: text})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tiers", description="Times to first token by the tier that has a prompt."
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="prompts and lives (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="of a seed (default: %(default)s)")
    parser.add_argument("--length", type=int, default=4000, metavar="N", help="of a prompt (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=4, metavar="N", help="that run (default: %(default)s)")
    parser.add_argument("--core", type=int, metavar="CPU", help="the server's; any of this process's when left out")
    parser.add_argument("--folder", help="where blocks are kept, on a disk (default: that of temporary files)")
    parser.add_argument("--note", default="", metavar="TEXT", help="what else is to be said of the machine")
    parser.add_argument("--anew", action="store_true", help="measure also what is recorded")
    parser.add_argument("--record", action="store_true", help="write results/tiers.json and docs/performance.md")
    options = parser.parse_args()
    for name, least, most in (("seeds", 1, 1000), ("rounds", 1, 4), ("streams", 1, 12), ("length", 128, 4080)):
        if not least <= (value := getattr(options, name)) <= most:
            parser.error(f"--{name} {value} is not from {least} to {most}")
    try:
        options.num_blocks = pool_blocks(options.length, options.streams, _STREAM_PROMPT + _STREAM_TOKENS)
    except ValueError as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    main()
