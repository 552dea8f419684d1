"""Weights of fewer bits beside llama.cpp's: one stream of each, on one core, in turns.

    python -m benchmarks.peers.fewer_bits [--turns 5]

jpaged reads the checkpoint as it is, quantizes it while loading (int8: a scale a column; int4: one for 128 numbers),
and reads llama.cpp's files. llama.cpp reads its own files alone, which its llama-quantize makes of the checkpoint:
Q8_0 has a float16 scale for each 32 numbers; so has Q4_0, whose embedding is Q6_K. The engines take turns, A B C A B
C. What counts is the median of processor time: each has a core and nothing else to do on it. The table comes into
docs/performance.md, the turns into benchmarks/results/fewer_bits.json.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.peers import rounds, workloads
from benchmarks.peers.checkpoints import SHAPES, Shape, make_files
from benchmarks.peers.environments import Home, install
from benchmarks.peers.peers import OURS, PEERS, Peer
from benchmarks.peers.session import ROOT, Session, require_taskset
from benchmarks.record import put_on_page, save

MODEL = "M"
STREAM = "W5"
THEIRS = "llama.cpp"
LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Weights:
    """What one engine reads.

    Attributes:
        bits: of a weight as stored, scales aside.
        kind: as a user names it.
        peer: the engine, told to read that.
    """

    bits: int
    kind: str
    peer: Peer


def every_weights() -> list[Weights]:
    """Returns what is measured, the engines beside each other, the model's own type first."""
    ours, theirs = PEERS[OURS], PEERS[THEIRS]

    def quantized(bits: int, kind: str) -> Weights:
        return Weights(bits, kind, replace(ours, name=f"{OURS}-{kind}", options={**ours.options, "quantization": kind}))

    def of_file(bits: int, peer: Peer, kind: str) -> Weights:
        return Weights(bits, kind, replace(peer, name=f"{peer.name}-{kind}", weights=kind))

    return [
        Weights(16, "bfloat16", ours),
        Weights(16, "bfloat16", theirs),
        *(quantized(8, "int8"), of_file(8, ours, "Q8_0"), of_file(8, theirs, "Q8_0")),
        *(quantized(4, "int4"), of_file(4, ours, "Q4_0"), of_file(4, theirs, "Q4_0")),
    ]


def measure(every: Sequence[Weights], shape: Shape, home: Home, core: int, num_turns: int) -> dict[str, list[float]]:
    """Returns the seconds of processor time that each engine took for the stream, turn by turn, by the peer's name.

    Raises:
        PeerFailed: one of them ended, or did not do what was asked.
    """
    path = rounds.workload_path(home, shape.name, STREAM)
    workloads.write(path, workloads.make(shape.name, STREAM))
    taken: dict[str, list[float]] = {weights.peer.name: [] for weights in every}
    with ExitStack() as stack:
        sessions: dict[str, Session] = {}
        for weights in every:
            session = sessions[weights.peer.name] = Session(weights.peer, shape, home, core)
            stack.callback(session.close)
            session.run(path, limit_s=LIMIT_S, is_warm_up=True)
            _say(f"{weights.peer.name} is ready")
        for _ in range(num_turns):
            for name, session in sessions.items():
                taken[name].append(session.run(path, limit_s=LIMIT_S).processor_s)
                _say(f"{name}: {taken[name][-1]:.2f} s of processor time")
    return taken


def table(every: Sequence[Weights], taken: Mapping[str, Sequence[float]], num_tokens: int) -> str:
    """Return a Markdown table: tokens/s, relative to the same engine at 16 bits and to llama.cpp at the same width."""
    spent = {name: median(turns) for name, turns in taken.items()}
    their_s = {weights.bits: spent[weights.peer.name] for weights in every if not weights.peer.is_ours}
    own_s = {weights.peer.is_ours: spent[weights.peer.name] for weights in every if weights.bits == 16}
    lines = [
        "| bits | engine | weights | tokens/s (range) | x jpaged at 16 bits | x llama.cpp at the same width |",
        "|---|---|---|---|---|---|",
    ]
    for weights in every:
        name = weights.peer.name
        rate, *spread = (num_tokens / s for s in (spent[name], max(taken[name]), min(taken[name])))
        engine = OURS if weights.peer.is_ours else THEIRS
        beside = f"{their_s[weights.bits] / spent[name]:.2f}" if weights.peer.is_ours else "-"
        lines.append(
            f"| {weights.bits} | {engine} | {weights.kind} | {rate:.1f} ({spread[0]:.1f} to {spread[1]:.1f}) | "
            f"{own_s[weights.peer.is_ours] / spent[name]:.2f} | {beside} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.fewer_bits", description="One stream beside llama.cpp's, in fewer bits."
    )
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--turns", type=int, default=5, help="of each engine (5)")
    parser.add_argument("--core", type=int, choices=cores, default=cores[-1], help="where all run (the last)")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-peers", help="of the environments (.venv-peers)")
    options = parser.parse_args()
    if options.turns < 1:
        parser.error(f"--turns {options.turns} is out of range: must be >= 1")
    home, shape, every = Home(options.folder.resolve()), SHAPES[MODEL], every_weights()
    require_taskset()
    install(home, PEERS[THEIRS].environment, _say)
    make_files(shape, home, sorted({weights.peer.weights for weights in every}), _say)
    taken = measure(every, shape, home, options.core, options.turns)
    num_tokens = sum(job.num_output_tokens for job in workloads.make(shape.name, STREAM))
    text = table(every, taken, num_tokens)
    record = {"model": shape.name, "workload": STREAM, "num_tokens": num_tokens, "processor_s": taken}
    save("fewer_bits", "python -m benchmarks.peers.fewer_bits", record)
    put_on_page({"fewer bits": text})
    print(text)


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


if __name__ == "__main__":
    main()
