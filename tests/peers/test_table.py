"""The page that is written from the records."""

import json
from typing import Any

import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers.checkpoints import SHAPES
from benchmarks.peers.environments import Home
from benchmarks.peers.limits import Rates, least_s
from benchmarks.peers.peers import PEERS
from benchmarks.peers.rounds import Plan
from benchmarks.peers.table import limits, markdown, timed
from benchmarks.peers.workloads import make

MACHINE = {"processor": "a core", "num_cpus": 2, "load_average": 0.1}
AGREED = {"num_sequences": 3, "num_equal": 2, "num_tokens": 30, "num_before": 25}


def row(**peers):
    filled = {name: {"about": {name: "1.2"}, **entry} for name, entry in peers.items()}
    return {"date": "2026-01-02", "commit": "abc", "machine": MACHINE, "num_output_tokens": 128, "peers": filled}


ROW = row(
    jpaged={"wall_s": [2.0, 2.2, 1.8], "processor_s": [1.9, 1.9, 1.9]},
    vllm={"wall_s": [3.0], "processor_s": [1.9], "agreement": AGREED},
)
ROW["peers"]["llama.cpp"] = {"about": {}, "missing": "could not be installed: no compiler"}
RATES: dict[str, Any] = {"read_bytes_s": 1e9, "flops": {"float32": 1e12, "bfloat16": 2e12}}


def page(**record):
    return markdown({"S": {"rows": {"W5": ROW}, **record}})


def test_a_row_has_medians_spreads_and_ratios():
    lines = page().splitlines()
    assert "| W5: one stream, 128 tokens | 2.00 (1.80 to 2.20) | 3.00* (3.00 to 3.00) | - | - |" in lines
    assert "| W5: one stream | 1.50 (1.00) | - | 1.50 (vllm) | - |" in lines


def test_what_is_missing_is_said_and_why():
    assert "- llama.cpp, W5: could not be installed: no compiler" in page().splitlines()


def test_a_core_that_was_not_ones_own_is_marked():
    assert "the core was not the peer's alone" in page()
    calm = row(jpaged={"wall_s": [1.0], "processor_s": [1.0]})
    assert "the core was not the peer's alone" not in markdown({"S": {"rows": {"W5": calm}}})


def test_the_agreement_of_tokens_is_told():
    assert "| W5 | vllm | 2 of 3 | 25 of 30 |" in page().splitlines()


def test_machine_versions_and_commit_are_told():
    assert "- W5: 2026-01-02, commit abc, a core, 2 cores, load 0.1" in page().splitlines()
    assert "vllm 1.2" in page()


def test_the_limit_is_of_the_cores_rates():
    record = {"rates": {**RATES, "read_bytes_s": 1e12}}
    taken = {"W5": timed(ROW)}
    expected = least_s(SHAPES["S"], make("S", "W5"), Rates(1e12, 1e12))
    assert limits(SHAPES["S"], record, taken) == {"W5": pytest.approx(expected)}


def test_a_peer_that_reads_quicker_than_the_probe_sets_the_limit():
    read = 128 * SHAPES["S"].num_parameters_read * 4 / 1.9
    expected = least_s(SHAPES["S"], make("S", "W5"), Rates(read, 1e12))
    assert limits(SHAPES["S"], {"rates": RATES}, {"W5": timed(ROW)}) == {"W5": pytest.approx(expected)}
    assert page(rates=RATES).count(f"{1.9 / expected:.2f}") == 1


def test_without_rates_there_is_no_limit():
    assert limits(SHAPES["S"], {}, {"W5": timed(ROW)}) == {}


def test_rows_are_in_the_order_of_the_workloads_whatever_was_measured_first():
    text = markdown({"S": {"rows": {"start": ROW, "W5": ROW, "W1": ROW}}})
    places = [text.index(title) for title in ("| W1: chats", "| W5: one stream", "| second start")]
    assert places == sorted(places)


def test_a_measured_row_replaces_its_own_and_keeps_the_others(tmp_path, capsys):
    for workload, entry in (("W5", ROW), ("W1", ROW), ("W5", row(jpaged={"wall_s": [9.0]}))):
        command._save(SHAPES["S"], tmp_path, workload, entry, RATES)
    record = json.loads((tmp_path / "peers_S.json").read_text())
    assert record["rates"] == RATES
    assert record["rows"]["W5"]["peers"]["jpaged"]["wall_s"] == [9.0]
    assert record["rows"]["W1"] == ROW
    command._write_table(tmp_path)
    assert (tmp_path / "peers.md").read_text() in capsys.readouterr().out


def test_of_rates_that_were_measured_twice_the_greater_stay(tmp_path):
    read, flops = RATES["read_bytes_s"], RATES["flops"]
    for rates in (RATES, {"read_bytes_s": 2 * read, "flops": {name: value / 2 for name, value in flops.items()}}):
        command._save(SHAPES["S"], tmp_path, "W5", ROW, rates)
    record = json.loads((tmp_path / "peers_S.json").read_text())
    assert record["rates"] == {"read_bytes_s": 2 * read, "flops": flops}


def test_a_core_is_not_measured_without_the_environment_that_measures_it(tmp_path, capsys):
    python = tmp_path / "venvs" / command.RATES / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()  # an installation that failed leaves its interpreter
    assert command._rates(Home(tmp_path), 0) is None
    assert "no limits: they are measured by PyTorch" in capsys.readouterr().out


def test_without_a_record_there_is_no_table(tmp_path):
    with pytest.raises(command.CannotMeasure, match=r"has no record of peers_S.json, peers_M.json"):
        command._write_table(tmp_path)


def test_too_little_memory_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(Plan, "needs_bytes", lambda plan: 1 << 60)
    plan = Plan(SHAPES["M"], ["jpaged", "vllm"], ["W5"], None, 0)
    with pytest.raises(command.CannotMeasure, match=r"jpaged, vllm beside each other need 1073741824.0 GiB for M and"):
        command._require_memory(plan)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peers", "sglang"], "invalid choice: 'sglang'"),
        (["--repeats", "0"], "0 is out of range: must be >= 1"),
        (["--core", "-1"], "invalid choice: -1"),
    ],
)
def test_what_is_out_of_range_is_refused(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["peers", *arguments])
    with pytest.raises(SystemExit):
        command.arguments()
    assert said in capsys.readouterr().err


def test_every_peer_says_how_long_each_workload_takes():
    for peer in PEERS.values():
        for model in SHAPES:
            assert peer.expected_s[model].keys() == {"W1", "W2", "W3", "W4", "W5", "T1", "start"}


def point(rate, answered, tpot_ms):
    return {
        "rate": rate,
        "request_throughput": answered,
        "output_throughput": 128 * answered,
        "median_ttft_ms": 50.0,
        "median_tpot_ms": tpot_ms,
        "completed": 128,
    }


def test_servers_are_told_by_the_rate_where_the_other_saturates():
    ours = [
        point("inf", 12.0, 40.0),
        point("8.000", 8.0, 20.0),
        point("11.200", 11.0, 29.0),
        point("16.000", 12.0, 60.0),
    ]
    points = {"jpaged": ours, "vllm": [point("inf", 8.0, 70.0), point("8.000", 7.5, 30.0)]}
    text = page(rows={"serve": {**row(), "points": points}})
    assert "| vllm | 8.000 | 7.50 | 960.0 | 50.0 | 30.0 |" in text.splitlines()
    assert "saturates at 8.00 requests a second, where half of them take 30.0 ms" in text
    assert "keeps to that up to 1.40 times the rate, and answers 1.50 times as many" in text


def test_servers_that_could_not_be_measured_say_why():
    assert "Not measured, or not to the end: no network" in page(rows={"serve": {**row(), "missing": "no network"}})
