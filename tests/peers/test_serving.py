"""Servers under load: their command lines, who takes which turn, and what a failure leaves."""

import os
from contextlib import contextmanager

import pytest

from benchmarks.peers import serving
from benchmarks.peers.checkpoints import SHAPES
from benchmarks.peers.environments import Home
from benchmarks.peers.serving import client_command, measure, running, saturation, server_command, sustained
from benchmarks.peers.session import PeerFailed

SHAPE = SHAPES["S"]
CORE = min(os.sched_getaffinity(0))


def point(rate, answered=1.0, tpot_ms=1.0):
    return {"rate": rate, "request_throughput": answered, "median_tpot_ms": tpot_ms}


def test_a_server_has_one_core_and_its_own_options(tmp_path):
    ours = server_command("jpaged", SHAPE, Home(tmp_path), 1, 5000)
    theirs = server_command("vllm", SHAPE, Home(tmp_path), 1, 5001)
    assert ours[:3] == theirs[:3] == ["taskset", "-c", "1"]
    assert ours[ours.index("serve") + 1] == str(tmp_path / "models" / "S")
    assert ours[ours.index("--num-blocks") + 1] == "10922"  # 1 GiB
    assert theirs[theirs.index("--block-size") + 1] == "32"
    assert theirs[theirs.index("--port") + 1] == "5001"


@pytest.mark.parametrize(("name", "expected"), [("jpaged", ["--target", "127.0.0.1:77"]), ("vllm", ["--base-url"])])
def test_the_client_speaks_each_servers_language(tmp_path, name, expected):
    command = client_command(name, 77, SHAPE, Home(tmp_path), "1.5", 3, tmp_path / "out.json")
    begin = command.index(expected[0])
    assert command[begin : begin + len(expected)] == expected
    assert command[command.index("--request-rate") + 1] == "1.5"
    assert command[command.index("--seed") + 1] == "3"


def test_servers_take_turns_at_multiples_of_the_others_saturation(tmp_path, monkeypatch):
    turns = []

    def run(name, port, shape, home, rate, seed, core):
        turns.append((name, rate, seed))
        return point(rate, answered={"jpaged": 30.0, "vllm": 20.0}[name])

    @contextmanager
    def up(name, shape, home, core):
        yield 1

    monkeypatch.setattr(serving, "running", up)
    monkeypatch.setattr(serving, "_run", run)
    monkeypatch.setattr(serving, "MULTIPLES", (0.5, 1.4))
    row = measure(SHAPE, {}, Home(tmp_path), CORE, lambda line: None)
    rates = ["inf", "10.000", "28.000"]
    # Each rate has its own prompts, which both servers get: neither has them in its prefix cache.
    assert turns == [(name, rate, seed) for seed, rate in enumerate(rates) for name in ("jpaged", "vllm")]
    assert [one["rate"] for one in row["points"]["vllm"]] == rates
    assert "missing" not in row


def test_without_the_other_server_nothing_is_started(tmp_path):
    row = measure(SHAPE, {"vllm": "could not be installed: no network"}, Home(tmp_path), CORE, lambda line: None)
    assert row == {"missing": "could not be installed: no network"}


@pytest.mark.long
def test_a_server_that_ends_is_told_with_its_last_error(tmp_path):
    server = running("jpaged", SHAPE, Home(tmp_path), CORE)
    with pytest.raises(PeerFailed, match=r"the server of jpaged ended with 1: .* folder .*models/S does not exist"):
        server.__enter__()


def test_the_rate_that_is_sustained_is_the_highest_within_the_limit():
    points = [
        point("inf", 9.0, 1.0),
        point("4.0", tpot_ms=10.0),
        point("6.0", tpot_ms=20.0),
        point("8.0", tpot_ms=21.0),
    ]
    assert sustained(points, 20.0) == 6.0
    assert sustained(points, 5.0) == 0.0
    assert saturation(points) == 9.0
