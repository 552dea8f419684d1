"""A server with a disk beneath it, killed with -9 at random moments: no token is ever wrong, and no start is refused.

    start ── finds what it left ── prompts that begin alike, over and over ── SIGKILL ── start ...

Each life is a process of its own, with the demo model and one folder for all. It tells every answer as it comes; each
is held to what the prompt gave before there was a disk. A life that does not start, an answer that differs, or blocks
that a life had on disk and the next one has not, are errors.

    python -m benchmarks.tiers.kills [--kills 200] [--seconds 2]
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import put_on_page, save
from jpaged import json_text

_PROMPTS, _MAX_TOKENS = 24, 6
_SIZES: dict[str, Any] = {"max_model_len": 256, "num_blocks": 48, "max_num_seqs": 8, "max_num_batched_tokens": 64}
_DISK: dict[str, Any] = {"swap_space": 0.01, "kv_disk_space": 0.004}
_LIFE_S = 600.0
"""A life that takes so long hangs, and is killed: that is an error."""


@dataclass(frozen=True, slots=True)
class Kills:
    """What came of it.

    Attributes:
        answers: that were held to what they have to be.
        hit_tokens: of prompts, that came back from disk.
        found: blocks that a life found when it began, the most of any.
        dropped: blocks that were not what their hash says.
    """

    kills: int
    answers: int
    hit_tokens: int
    found: int
    dropped: int
    seconds: float


def prompts(seed: int) -> list[list[int]]:
    """Prompts of a few beginnings, with ends of their own."""
    choose = random.Random(seed)
    heads = [[choose.randrange(3, 250) for _ in range(150)] for _ in range(4)]
    return [[*choose.choice(heads), *(choose.randrange(3, 250) for _ in range(16))] for _ in range(_PROMPTS)]


def live(folder: str | None, seed: int) -> None:
    """One life: answers prompts for ever and tells of each, or once of each where there is no disk."""
    from jpaged.llm import LLM, TokensPrompt
    from jpaged.types import SamplingParams

    disk = {} if folder is None else {**_DISK, "kv_disk_dir": folder}
    asked, params = prompts(0), SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0, ignore_eos=True)
    order = random.Random(seed)
    with LLM("demo", **_SIZES, **disk) as llm:
        print(json_text.dumps({"ready": llm.load().num_disk_blocks}), flush=True)
        while True:
            places = [*range(_PROMPTS)] if folder is None else [order.randrange(_PROMPTS) for _ in range(4)]
            given = [TokensPrompt(prompt_token_ids=asked[place]) for place in places]
            outputs = llm.generate(given, params, use_tqdm=False)
            load = llm.load()
            for place, output in zip(places, outputs, strict=True):
                tokens = [*output.outputs[0].token_ids]
                told = {"place": place, "tokens": tokens, "hits": load.num_disk_hit_tokens}
                disk = {"kept": load.num_disk_blocks, "dropped": load.num_disk_blocks_dropped}
                print(json_text.dumps({**told, **disk}), flush=True)
            if folder is None:
                return


def begin(folder: str | None, seed: int) -> subprocess.Popen[str]:
    """A life in a process of its own, which has an end in any case."""
    words = [sys.executable, "-m", "benchmarks.tiers.kills", "--live", folder or "", "--seed", str(seed)]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    limit = threading.Timer(_LIFE_S, child.kill)
    limit.daemon = True
    limit.start()
    return child


def lines(child: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What a life has told: whole lines alone, for the last may be cut off."""
    assert child.stdout is not None
    return [json.loads(line) for line in child.stdout if line.startswith("{") and line.endswith("}\n")]


def right_answers() -> dict[int, list[int]]:
    """What each prompt gives without a disk."""
    child = begin(None, 0)
    told = {one["place"]: one["tokens"] for one in lines(child) if "place" in one}
    if child.wait() or len(told) != _PROMPTS:
        raise SystemExit("the prompts were not answered without a disk")
    return told


def kill(num_kills: int, longest_s: float, folder: str, seed: int = 0, most_answers: int = 0) -> Kills:
    """Begins and kills so many lives, and holds what they tell to what is right.

    Args:
        longest_s: the longest time that a life has behind its beginning.
        most_answers: a number of answers, this one at most, is waited for before that time begins.

    Raises:
        SystemExit: a life did not start, an answer was wrong, or what was on disk is not.
    """
    right, choose, begin_s = right_answers(), random.Random(seed), time.monotonic()
    num_answers = num_hits = most_found = num_dropped = num_kept = 0
    for life in range(num_kills):
        child = begin(folder, life)
        assert child.stdout is not None
        first = child.stdout.readline()
        if '"ready"' not in first:
            raise SystemExit(f"life {life} did not start: {first!r}, status {child.wait()}")
        num_found = json.loads(first)["ready"]
        if num_kept and not num_found:
            raise SystemExit(f"life {life} found nothing; the one before had {num_kept} blocks on disk")
        most_found = max(most_found, num_found)
        told: list[dict[str, Any]] = []
        for _ in range(choose.randint(0, most_answers)):
            if not (line := child.stdout.readline()):
                raise SystemExit(f"life {life} ended behind {len(told)} answers, with status {child.wait()}")
            told.append(json.loads(line))
        time.sleep(longest_s * choose.random() ** 2)
        child.send_signal(signal.SIGKILL)
        told += lines(child)
        if child.wait() != -signal.SIGKILL:
            raise SystemExit(f"life {life} ended by itself, with status {child.returncode}")
        for one in told:
            if one["tokens"] != right[one["place"]]:
                raise SystemExit(f"life {life}: prompt {one['place']} gave {one['tokens']}, not {right[one['place']]}")
        num_answers += len(told)
        num_hits += told[-1]["hits"] if told else 0
        num_dropped += told[-1]["dropped"] if told else 0
        num_kept = told[-1]["kept"] if told else num_found
    seconds = time.monotonic() - begin_s
    return Kills(num_kills, num_answers, num_hits, most_found, num_dropped, round(seconds, 1))


def table(done: Kills) -> str:
    """What came of it, for the page."""
    columns = {
        "kills": done.kills,
        "answers, all as without a disk": done.answers,
        "tokens that came back": done.hit_tokens,
        "blocks found by a start, the most": done.found,
        "blocks that were not what their hash says": done.dropped,
    }
    return "\n".join(
        (
            f"| {' | '.join(columns)} |",
            "|---" * len(columns) + "|",
            f"| {' | '.join(map('{:,}'.format, columns.values()))} |",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tiers.kills", description="Kills a server with a disk at random moments."
    )
    parser.add_argument("--kills", type=int, default=200, help="lives that are killed (%(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="the longest of them serves so long (%(default)s)")
    parser.add_argument("--live", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help="which moments, and which prompts (%(default)s)")
    parser.add_argument(
        "--record", action="store_true", help="write benchmarks/results/tier_kills.json and docs/performance.md"
    )
    options = parser.parse_args()
    if options.live is not None:
        live(options.live or None, options.seed)
        return
    with tempfile.TemporaryDirectory() as folder:
        done = kill(options.kills, options.seconds, str(Path(folder) / "kv"), options.seed)
    print(done)
    if options.record:
        save("tier_kills", f"python -m benchmarks.tiers.kills --kills {options.kills} --record", asdict(done))
        put_on_page({"kills": table(done)})


if __name__ == "__main__":
    main()
