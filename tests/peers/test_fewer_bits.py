"""Weights of fewer bits beside llama.cpp's: who reads which file, whose turn it is, and what the table says."""

import json
import os
import subprocess
from dataclasses import replace

import pytest

from benchmarks.peers import checkpoints, workloads
from benchmarks.peers.checkpoints import SHAPES, make_files
from benchmarks.peers.environments import Home
from benchmarks.peers.fewer_bits import Weights, every_weights, measure, table
from benchmarks.peers.peers import LLAMA_SERVER
from benchmarks.peers.session import command
from benchmarks.peers.workloads import Job
from tests.peers.fake_worker import TURNS
from tests.peers.shapes import TINY, fake_peer

CORE = min(os.sched_getaffinity(0))


def test_each_engine_is_given_its_weights(tmp_path):
    home = Home(tmp_path)
    told = {}
    for weights in every_weights():
        settings = json.loads(command(weights.peer, SHAPES["M"], home, CORE)[-1])
        path = settings["folder"].removeprefix(f"{tmp_path}/")
        told[weights.peer.name] = (weights.bits, path, settings["options"].get("quantization"))
    assert told == {
        "jpaged": (16, "models/M", None),
        "llama.cpp": (16, "gguf/M.gguf", None),
        "jpaged-int8": (8, "models/M", "int8"),
        "jpaged-Q8_0": (8, "gguf/M-Q8_0.gguf", None),
        "llama.cpp-Q8_0": (8, "gguf/M-Q8_0.gguf", None),
        "jpaged-int4": (4, "models/M", "int4"),
        "jpaged-Q4_0": (4, "gguf/M-Q4_0.gguf", None),
        "llama.cpp-Q4_0": (4, "gguf/M-Q4_0.gguf", None),
    }


def test_llama_cpps_own_tool_makes_its_files_of_one_that_is_made_once(tmp_path, monkeypatch):
    ran = []

    def note(words, **options):
        ran.append([word.removeprefix(f"{tmp_path}/") for word in words])
        (tmp_path / ran[-1][2 if "llama-quantize" in words[0] else -1]).touch()
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", note)
    (tmp_path / "models" / "S").mkdir(parents=True)
    monkeypatch.setattr(checkpoints, "make", lambda shape, folder: (folder / "config.json").touch())
    make_files(TINY, Home(tmp_path), ["", "Q4_0", "Q8_0"], lambda line: None)
    assert [words[-2:] for words in ran] == [["models/S", "gguf/S.new"], ["Q4_0", "1"], ["Q8_0", "1"]]
    assert ran[1] == ["build/llama/bin/llama-quantize", "gguf/S.gguf", "gguf/S-Q4_0.new", "Q4_0", "1"]
    assert {path.name for path in (tmp_path / "gguf").iterdir()} == {"S.gguf", "S-Q4_0.gguf", "S-Q8_0.gguf"}
    num_commands = len(ran)
    make_files(TINY, Home(tmp_path), ["Q8_0"], lambda line: None)
    assert len(ran) == num_commands


def test_the_engines_take_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(workloads, "make", lambda model, workload: [Job([1], 9)])
    every = [Weights(16, "bfloat16", fake_peer("a")), Weights(8, "int8", fake_peer("b"))]
    taken = measure(every, TINY, Home(tmp_path), CORE, 2)
    runs = [turn for turn in (tmp_path / TURNS).read_text().splitlines() if " run " in turn]
    assert runs == ["a run 4", "b run 4", "a run 9", "b run 9", "a run 9", "b run 9"]
    assert [len(turns) for turns in taken.values()] == [2, 2]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (2, "| 16 | jpaged | bfloat16 | 32.0 (25.6 to 64.0) | 1.00 | 0.50 |"),
        (3, "| 16 | llama.cpp | bfloat16 | 64.0 (64.0 to 64.0) | 1.00 | - |"),
        (4, "| 8 | jpaged | int8 | 64.0 (64.0 to 64.0) | 2.00 | 0.67 |"),
        (5, "| 8 | llama.cpp | Q8_0 | 96.0 (96.0 to 96.0) | 1.50 | - |"),
    ],
)
def test_the_table_compares_with_own_and_with_their_bits(line, expected):
    ours, theirs = fake_peer("jpaged"), replace(fake_peer("llama.cpp"), environment="lcpp", worker=LLAMA_SERVER)
    every = [
        Weights(16, "bfloat16", ours),
        Weights(16, "bfloat16", theirs),
        Weights(8, "int8", replace(ours, name="jpaged-int8")),
        Weights(8, "Q8_0", replace(theirs, name="llama.cpp-Q8_0")),
    ]
    taken = {
        "jpaged": [4.0, 5.0, 2.0],
        "llama.cpp": [2.0] * 3,
        "jpaged-int8": [2.0] * 3,
        "llama.cpp-Q8_0": [4 / 3] * 3,
    }
    assert table(every, taken, 128).splitlines()[line] == expected
