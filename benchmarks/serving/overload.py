"""A server's first tokens under a light load, and its throughput under more load than it can serve.

    saturation   all requests at once: how many the server answers in a second
    idle         one request at a time, with pauses: the time to the first token
    light        0.4 times the saturation: the same, in relation to idle
    overload     1.6 and 4 times the saturation: tokens a second, in relation to all at once

Tokens a second are those between the first and the last fifth of all tokens. Neither the time until all rows are taken
counts, nor the end, when requests run out. The server has one core and the client, `jpaged bench serve`, another.
Each run has new prompts, of 64 to 192 tokens, as many as are generated. Several checkouts of jpaged take turns:

    python -m benchmarks.serving.overload [--checkouts DIR ...] [--rounds 3] [--model S] [--cores 0 1] [-- FLAG ...]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.checkpoints import SHAPES, make
from benchmarks.record import machine, save

HERE = Path(__file__).parents[2]
IDLE_RATE, LIGHT, OVERLOADS = 0.12, 0.4, (1.6, 4.0)
"""Multiples of the saturation."""
COUNTED = 0.2, 0.8
"""Shares of all tokens between which the throughput is measured."""
NUM_TOKENS = 128
START_LIMIT_S = 600.0
_READY = re.compile(r"^ready on \S*:(?P<port>\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Round:
    """What one checkout did in one round.

    Attributes:
        saturation: requests a second, all at once.
        idle_ms, light_ms: medians of the time to the first token.
        light_tpot_ms: median time per token under the light load.
        throughputs: tokens a second, by multiple of the saturation; "inf" is all at once.
    """

    checkout: str
    saturation: float
    idle_ms: float
    light_ms: float
    light_tpot_ms: float
    throughputs: Mapping[str, float]

    @property
    def first_token_ratio(self) -> float:
        return self.light_ms / self.idle_ms

    def throughput_ratio(self, multiple: float) -> float:
        """Returns the throughput at a multiple of the saturation over that of all requests at once."""
        return self.throughputs[f"{multiple:g}"] / self.throughputs["inf"]


def counted_throughput(detailed: Mapping[str, Any]) -> float:
    """Returns the tokens a second between the first and the last fifth of all tokens.

    Args:
        detailed: a result of `jpaged bench serve --save-detailed`; the tokens of a message are taken as evenly spread.
    """
    times_s = list[float]()
    keys = ("start_times", "ttfts", "itls")
    for start_s, first_s, gaps_s in zip(*(detailed[key] for key in keys), strict=True):
        now_s = start_s + first_s
        times_s.append(now_s)
        for gap_s in gaps_s:
            now_s += gap_s
            times_s.append(now_s)
    times_s.sort()
    begin, end = (int(share * (len(times_s) - 1)) for share in COUNTED)
    share = sum(detailed["output_lens"]) / len(times_s)
    return share * (end - begin) / (times_s[end] - times_s[begin])


@contextlib.contextmanager
def serving(checkout: Path, model: str, core: int, flags: Sequence[str]) -> Iterator[str]:
    """Starts a server on its core and yields its address."""
    with tempfile.NamedTemporaryFile("w+") as log:
        command = ["taskset", "-c", str(core), sys.executable, "-P", "-m", "jpaged", "serve", model, "--port", "0"]
        command += ["--max-model-len", "1024", "--wait-for-all-programs", *flags]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=checkout, env=environment)
        try:
            deadline_s = time.monotonic() + START_LIMIT_S
            while (found := _READY.search(text := Path(log.name).read_text())) is None:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit(f"the server of {checkout} did not start:\n{text}")
                time.sleep(0.2)
            yield f"127.0.0.1:{found['port']}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def run_client(target: str, model: str, core: int, rate: str, num_prompts: int, seed: int, *flags: str) -> Any:
    """Runs the client once and returns its detailed result."""
    options = {
        "target": target,
        "tokenizer": model,
        "hardware": "none",
        "request-rate": rate,
        "num-prompts": num_prompts,
        "seed": seed,
        "random-input-len": NUM_TOKENS,
        "random-output-len": NUM_TOKENS,
        "random-range-ratio": 0.5,
    }
    with tempfile.TemporaryDirectory() as folder:
        command = ["taskset", "-c", str(core), sys.executable, "-P", "-m", "jpaged", "bench", "serve"]
        command += [part for key, value in options.items() for part in (f"--{key}", str(value))]
        command += ["--save-detailed", "--save-result", "--result-dir", folder, "--result-filename", "run.json", *flags]
        environment = {**os.environ, "PYTHONPATH": str(HERE)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise SystemExit(f"the client ended with {done.returncode}: {done.stdout}{done.stderr}")
        return json.loads((Path(folder) / "run.json").read_text())


def measure(checkout: str, target: str, model: str, core: int, seed: int, num_prompts: int) -> Round:
    """Runs all loads on one server."""

    def run(rate: str, num_prompts: int, *flags: str) -> Any:
        nonlocal seed
        seed += 1
        return run_client(target, model, core, rate, num_prompts, seed, *flags)

    at_once = run("inf", num_prompts)
    saturation = at_once["request_throughput"]
    idle = run(f"{IDLE_RATE * saturation:.3f}", 30, "--max-concurrency", "1")
    light = run(f"{LIGHT * saturation:.3f}", 120)
    throughputs = {"inf": counted_throughput(at_once)}
    for multiple in OVERLOADS:
        throughputs[f"{multiple:g}"] = counted_throughput(run(f"{multiple * saturation:.3f}", num_prompts))
    first_ms = idle["median_ttft_ms"], light["median_ttft_ms"]
    return Round(checkout, saturation, *first_ms, light["median_tpot_ms"], throughputs)


def table(rounds: Sequence[Round]) -> str:
    """Returns the medians over the rounds as a Markdown table, ratios with the least and the most."""
    lines = ["| checkout | first token idle, ms | at 0.4 | ratio | ms a token at 0.4 | all at once, tokens/s | "]
    lines[0] += " | ".join(f"{multiple:g} times, ratio" for multiple in OVERLOADS) + " |"
    lines.append("|" + "---|" * (6 + len(OVERLOADS)))
    for checkout in dict.fromkeys(one.checkout for one in rounds):
        some = [one for one in rounds if one.checkout == checkout]
        plain = [[one.idle_ms for one in some], [one.light_ms for one in some]]
        cells = [f"{statistics.median(values):.1f}" for values in plain]
        cells.append(_spread([one.first_token_ratio for one in some]))
        cells.append(f"{statistics.median(one.light_tpot_ms for one in some):.2f}")
        cells.append(f"{statistics.median(one.throughputs['inf'] for one in some):.0f}")
        cells += [_spread([one.throughput_ratio(multiple) for one in some]) for multiple in OVERLOADS]
        lines.append(f"| {checkout} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    arguments = _arguments()
    server_core, client_core = arguments.cores
    rounds = list[Round]()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = arguments.model
        if model in SHAPES:
            make(SHAPES[model], Path(folder))
            model = folder
        targets = {
            str(checkout): stack.enter_context(serving(checkout.resolve(), model, server_core, arguments.flags))
            for checkout in arguments.checkouts
        }
        for number in range(arguments.rounds):
            order = list(targets.items())
            for checkout, target in order if number % 2 == 0 else reversed(order):
                rounds.append(measure(checkout, target, model, client_core, 100 * number, arguments.num_prompts))
                print(rounds[-1], flush=True)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(table(rounds))
    command = f"python -m benchmarks.serving.overload {' '.join(sys.argv[1:])}".strip()
    print(save("overload", command, {"rounds": [asdict(one) for one in rounds]}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.overload",
        description="A server's first tokens under a light load, and its throughput under more than it can serve.",
    )
    parser.add_argument("--model", default="S", help="of benchmarks.peers, or a folder (default: S)")
    parser.add_argument(
        "--checkouts", type=Path, nargs="+", default=[HERE], metavar="DIR", help="that are served (default: this one)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--num-prompts", type=int, default=768, metavar="N", help="of a run under overload")
    parser.add_argument("--cores", type=int, nargs=2, default=(0, 1), metavar="N", help="server, client (default: 0 1)")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="of the servers")
    arguments = parser.parse_args()
    for name in ("rounds", "num_prompts"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)} is below 1")
    return arguments


if __name__ == "__main__":
    main()
