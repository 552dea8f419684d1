"""Peers in turns: who runs when, what is kept, and what becomes of one that fails."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.peers import rounds, workloads
from benchmarks.peers.environments import Home
from benchmarks.peers.peers import OURS, PEERS, SERVE, SERVE_EXPECTED_S, START
from benchmarks.peers.rounds import Plan, Rounds
from benchmarks.peers.session import PeerFailed, Session
from benchmarks.peers.workloads import Job
from tests.peers.fake_worker import TURNS
from tests.peers.shapes import TINY, fake_peer

CORE = min(os.sched_getaffinity(0))
JOBS = {"W5": [Job([1], 9)], "W4": [Job([1], 7, beam_width=2), Job([2], 7, beam_width=2)]}


@contextmanager
def started(tmp_path: Path, *peers, repeats: int = 2, missing: dict[str, str] | None = None) -> Iterator[Rounds]:
    home = Home(tmp_path)
    for name, jobs in JOBS.items():
        workloads.write(rounds.workload_path(home, "S", name), jobs)
    plan = Plan(TINY, [peer.name for peer in peers], list(JOBS), repeats, CORE)
    with pytest.MonkeyPatch.context() as patch:
        for peer in peers:
            patch.setitem(PEERS, peer.name, peer)
        with Rounds(plan, missing or {}, home, lambda line: None) as turns:
            yield turns


def turns_of(tmp_path: Path) -> list[str]:
    return (tmp_path / TURNS).read_text().splitlines()


def test_peers_take_turns_after_a_warm_up_each(tmp_path):
    with started(tmp_path, fake_peer(), fake_peer("vllm")) as turns:
        cells = turns.measure("W5")
    runs = [turn for turn in turns_of(tmp_path) if " run " in turn]
    assert runs == [
        *("jpaged run 4", "jpaged run 9", "vllm run 4", "vllm run 9"),  # the first, of four tokens, is not timed
        *("jpaged run 9", "vllm run 9"),
    ]
    assert {name: cell.wall_s for name, cell in cells.items()} == {"jpaged": [2.0, 2.0], "vllm": [2.0, 2.0]}
    assert all(len(cell.processor_s) == 2 for cell in cells.values())


def test_what_is_cached_is_forgotten_before_each_run(tmp_path):
    with started(tmp_path, fake_peer()) as turns:
        turns.measure("W5")
    assert turns_of(tmp_path) == [
        "jpaged start",
        *["jpaged forget", "jpaged run 4"],
        *["jpaged forget", "jpaged run 9"] * 2,
        "jpaged close",
    ]


@pytest.mark.long
def test_every_start_but_the_first_counts_and_the_last_one_stays(tmp_path):
    with started(tmp_path, fake_peer(), fake_peer("vllm")) as turns:
        cells = turns.measure(START)
        turns.measure("W5")
    assert [len(cell.wall_s) for cell in cells.values()] == [2, 2]
    starts = [turn.removesuffix(" start") for turn in turns_of(tmp_path) if turn.endswith("start")]
    assert starts == ["jpaged", "vllm"] * 3


@pytest.mark.long
def test_a_peer_that_fails_says_why_and_runs_the_next_workload(tmp_path):
    with started(tmp_path, fake_peer(), fake_peer("vllm", fails_at=9)) as turns:
        first, second = turns.measure("W5"), turns.measure("W4")
    assert first["vllm"].missing.startswith("vllm ended with 1: ValueError: the pool is too small")
    assert first["vllm"].wall_s == []
    assert first["jpaged"].wall_s == [2.0, 2.0]
    assert second["vllm"].wall_s == [2.0, 2.0]
    assert not second["vllm"].missing


def test_a_peer_that_does_less_is_no_faster(tmp_path):
    with started(tmp_path, fake_peer(is_short=True)) as turns:
        cell = turns.measure("W5")[OURS]
    assert "job 0: 3 tokens came back for 4" in cell.missing
    assert cell.wall_s == []


def test_a_peer_that_stalls_is_cut_off(tmp_path):
    home = Home(tmp_path)
    workloads.write(tmp_path / "jobs", JOBS["W5"])
    session = Session(fake_peer(stalls=True), TINY, home, CORE)
    with pytest.raises(PeerFailed, match="jpaged was cut off after 0 s"):
        session.run(tmp_path / "jobs", limit_s=0.2)


def test_a_peer_that_is_not_installed_is_a_row_that_says_so(tmp_path):
    with started(tmp_path, fake_peer(), fake_peer("vllm"), missing={"vllm": "could not be installed: no"}) as turns:
        cells = turns.measure("W5")
        row = rounds.row(Plan(TINY, [OURS, "vllm"], ["W5"], 2, CORE), "W5", cells, turns.about)
    assert cells["vllm"].missing == "could not be installed: no"
    assert json.loads(json.dumps(row))["peers"]["vllm"]["missing"] == "could not be installed: no"
    assert not any(turn.startswith("vllm") for turn in turns_of(tmp_path))


def test_beams_are_not_asked_of_a_peer_without_them(tmp_path):
    with started(tmp_path, fake_peer(), fake_peer("llama.cpp", has_beams=False)) as turns:
        cells = turns.measure("W4")
    assert cells["llama.cpp"].missing == "has no beam search"


def test_a_row_has_versions_times_and_the_agreement_of_tokens(tmp_path):
    with started(tmp_path, fake_peer(), fake_peer("vllm", token=1)) as turns:
        cells = turns.measure("W5")
        plan = Plan(TINY, [OURS, "vllm"], ["W5"], None, CORE)
        row = rounds.row(plan, "W5", cells, turns.about)
    ours, theirs = row["peers"][OURS], row["peers"]["vllm"]
    assert row["digest"] == "aafb5018574b"
    assert row["num_output_tokens"] == 128
    assert ours["about"] == {"fake": "1.0"}
    assert ours["wall_s"] == [2.0, 2.0]
    assert ours["ttft_p50_s"] == 0.5
    assert ours["counts"] == {"steps": 3}
    assert theirs["agreement"] == {"num_sequences": 1, "num_equal": 0, "num_tokens": 9, "num_before": 0}
    assert "agreement" not in ours


@pytest.mark.parametrize(("repeats", "expected"), [(None, [5, 2]), (7, [7, 7])])
def test_rounds_are_as_many_as_asked_for(repeats, expected):
    plan = Plan(TINY, [OURS], ["W5", "W1"], repeats, CORE)
    assert [plan.num_rounds(workload) for workload in plan.workloads] == expected


def test_the_time_told_is_that_of_all_starts_and_turns():
    plan = Plan(TINY, ["vllm", "llama.cpp"], ["W4", "W5", START, SERVE], 3, CORE)
    starts, beams, stream = 35 + 0.5, 3.9, 0.7 + 0.3  # llama.cpp has no beams
    assert plan.expected_s() == pytest.approx(4 * starts + 3 * (beams + stream) + SERVE_EXPECTED_S)
