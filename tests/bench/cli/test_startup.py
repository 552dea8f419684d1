"""`jpaged bench startup`: phases read off what a server prints, and starts of the fake."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from jpaged.bench.cli.startup import Start, read_start, summarize
from jpaged.cli import server_process
from jpaged.cli.main import main
from tests.processes import ROOT


def test_a_phase_ends_with_its_last_line():
    lines = [
        (0.1, "PyTorch was not found."),
        (0.5, "listening on 127.0.0.1:1, loading demo"),
        (2.0, "[  1.9 s] weights embed.embedding: 1 of 26"),
        (2.5, "[  2.4 s] weights layers.3.mlp.down.kernel: 26 of 26"),
        (2.6, "[  2.5 s] pool of 4096 blocks of 16 tokens (256 MiB)"),
        (2.7, "[  2.6 s] steps of up to 64 rows and 512 tokens"),
        (3.0, "[  2.9 s] compiled: 1 of 24"),
        (3.7, "  model = demo (default)"),
        (4.0, "ready on 127.0.0.1:1"),
        (9.0, "[  8.9 s] compiled: 24 of 24"),
    ]
    start = read_start(lines)
    assert start.ready_s == 4.0
    assert start.phases_s == pytest.approx(
        {
            "process": 0.5,
            "imports": 1.5,
            "weights": 0.5,
            "pool": 0.1,
            "planning": 0.1,
            "compilation": 0.3,
            "opening": 1.0,
        }
    )
    assert sum(start.phases_s.values()) == pytest.approx(start.ready_s)


def test_starts_are_summed_up_under_vllms_keys():
    found = summarize("cold", [Start(2.0, {"process": 0.5, "compilation": 1.5}), Start(4.0, {"process": 4.0})])
    assert found["avg_cold_startup_time"] == 3.0
    assert found["cold_startup_times"] == [2.0, 4.0]
    assert found["cold_startup_percentiles"]["50"] == 3.0
    assert (found["avg_cold_compilation_time"], found["cold_compilation_times"]) == (0.75, [1.5, 0.0])
    assert found["cold_startup_phases"] == {"process": 2.25, "compilation": 0.75}


@pytest.fixture
def commands(monkeypatch) -> list[list[str]]:
    """What was started: the fake in the place of the real server."""
    started: list[list[str]] = []

    def command(model: str, flags: list[str]) -> list[str]:
        started.append([model, *flags])
        return [sys.executable, "-m", "tests.cli.fake_jpaged", "serve", model, "--port", "0", *flags]

    monkeypatch.setattr(server_process, "command", command)
    monkeypatch.chdir(ROOT)
    return started


@pytest.mark.long
def test_cold_and_warm_starts_are_timed(commands, tmp_path: Path, capsys):
    counts = ["--num-iters-cold", "1", "--num-iters-warmup", "1", "--num-iters-warm", "1"]
    words = ["--model", "fake-model", *counts, "--output-json", f"{tmp_path}/a.json", "--", "--max-num-seqs", "2"]
    assert main(["bench", "startup", *words]) == 0
    result = json.loads((tmp_path / "a.json").read_text())
    assert commands == [["fake-model", "--http-port", "0", "--max-num-seqs", "2"]] * 3
    for temperature in ("cold", "warm"):
        (seconds,) = result[f"{temperature}_startup_times"]
        assert result[f"avg_{temperature}_startup_time"] == seconds > 0
        phases = result[f"{temperature}_startup_phases"]
        assert phases.keys() == {"process", "imports", "weights", "programs", "opening"}
        assert sum(phases.values()) == pytest.approx(seconds)
    assert "cold (1)" in capsys.readouterr().out


@pytest.mark.long
def test_a_server_that_does_not_start_tells_why(commands, capsys):
    assert main(["bench", "startup", "--model", "broken", "--num-iters-cold", "1"]) == 1
    assert "broken is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--num-iters-cold", "--num-iters-warm", "--num-iters-warmup"])
def test_counts_out_of_range_are_named(flag, capsys):
    assert main(["bench", "startup", flag, "-1"]) == 2
    assert f"{flag}: -1 is out of range" in capsys.readouterr().err
