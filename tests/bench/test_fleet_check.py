"""The parts of `python -m benchmarks.fleet` that no server is needed for."""

import json

import pytest

from benchmarks.fleet import __main__ as command
from benchmarks.fleet.__main__ import DAYS
from benchmarks.fleet.check import day_of, simulated
from benchmarks.fleet.page import page_texts
from benchmarks.fleet.probes import SIZES, MeasuredTimes
from benchmarks.record import PAGE, RESULTS
from jpaged.capacity.cost import StepLoad
from jpaged.capacity.fleet.topology import START_S

TIMES = MeasuredTimes((0.002, 0.003, 0.004, 0.006, 0.01), tuple(0.001 * size for size in SIZES))


def test_steps_take_what_was_measured():
    assert TIMES.step_s(StepLoad.decoding(1, 100)) == 0.002
    assert TIMES.step_s(StepLoad.decoding(3, 100)) == pytest.approx(0.0035)
    assert TIMES.step_s(StepLoad(1, 60, 60, 1830)) == 0.001 * 64
    assert TIMES.step_s(StepLoad(5, 20, 900, 2000, 4, 880)) == pytest.approx(0.001 * 32 + 0.002)


def test_what_was_measured_before_and_after_counts_alike():
    later = MeasuredTimes(tuple(3 * seconds for seconds in TIMES.rows_s), TIMES.sizes_s)
    assert TIMES.mean_with(later).rows_s == pytest.approx([2 * seconds for seconds in TIMES.rows_s])
    assert TIMES.mean_with(later).sizes_s == TIMES.sizes_s


def test_a_simulated_small_model_takes_its_steps():
    outcome = simulated(2, day_of(4.0, 3.0), "prefix+load", 0, TIMES)
    assert len(outcome.ends) > 5
    assert outcome.totals.busy_s > 0.002 * outcome.totals.num_steps


def test_the_page_has_what_is_recorded():
    """Each table of the page is what the record makes of it, and each day has the command that it is made with."""
    record = json.loads((RESULTS / "fleet.json").read_text())
    page = PAGE.read_text()
    for name, text in page_texts(record).items():
        assert f"<!-- {name}: begin -->\n{text}\n<!-- {name}: end -->" in page
    for name, days in DAYS.items():
        for label, run in record.get(name, {}).items():
            assert run["command"] == " ".join(("jpaged bench fleet", *days[label]))


def test_a_start_takes_what_the_startup_table_says():
    starts = json.loads((RESULTS / "startup.json").read_text())["starts"]
    rounds = next(one["rounds"] for one in starts if (one["start"], one["programs"]) == ("cold", "in need"))
    assert sorted(one["ready_s"] for one in rounds)[1] == pytest.approx(START_S, rel=0.1)


def test_a_recording_that_was_stopped_goes_on_where_it_was(monkeypatch, tmp_path):
    (tmp_path / "fleet.json").write_text(json.dumps({"check": {"2": "old", "4": "old"}, "mixes": {"a": "old"}}))
    tried = []

    def compare(num_replicas, *given):
        tried.append(num_replicas)
        if tried == [2, 4]:
            raise KeyboardInterrupt
        return f"new {len(tried)}"

    def save(name, words, record):
        (tmp_path / f"{name}.json").write_text(json.dumps(record))

    for name, value in {"RESULTS": tmp_path, "compare": compare, "save": save, "put_on_page": len}.items():
        monkeypatch.setattr(command, name, value)
    monkeypatch.setattr(command, "page_texts", dict)
    monkeypatch.setattr("sys.argv", ["fleet", "check", "--again"])
    with pytest.raises(KeyboardInterrupt):
        command.main()
    monkeypatch.setattr("sys.argv", ["fleet", "check"])
    command.main()
    assert tried == [2, 4, 4]
    recorded = json.loads((tmp_path / "fleet.json").read_text())
    assert recorded == {"check": {"2": "new 1", "4": "new 3"}, "mixes": {"a": "old"}}
