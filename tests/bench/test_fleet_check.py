"""The parts of `python -m benchmarks.fleet` that no server is needed for."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest

from benchmarks.fleet import __main__ as command
from benchmarks.fleet.__main__ import DAYS
from benchmarks.fleet.check import day_of, simulated
from benchmarks.fleet.page import page_texts
from benchmarks.fleet.probes import DECODE_CONTEXTS, PROMPT_CONTEXTS, ROWS, SIZES, DrawnTimes, MeasuredTimes
from benchmarks.record import PAGE, RESULTS
from jpaged.capacity.cost import StepLoad
from jpaged.capacity.fleet.topology import START_S

TIMES = MeasuredTimes(
    np.array([[[0.001 * (1 + rows) + 1e-6 * rows * context] for context in DECODE_CONTEXTS] for rows in ROWS]),
    np.array([[[0.002 + 1e-4 * size + 1e-5 * context] for context in PROMPT_CONTEXTS] for size in SIZES]),
    np.array([[[0.003 + 1e-4 * size + 1e-5 * context] for context in PROMPT_CONTEXTS] for size in SIZES]),
    np.array([[0.001] for _ in DECODE_CONTEXTS]),
)


def test_steps_take_what_was_measured():
    times = DrawnTimes(TIMES, 0)
    assert times.step_s(StepLoad.decoding(1, 240)) == pytest.approx(0.00224)
    assert times.step_s(StepLoad.decoding(3, 100)) == pytest.approx(0.0043)
    assert times.step_s(StepLoad.decoding(1, 1000)) == pytest.approx(0.003)  # beyond what was measured
    assert times.step_s(StepLoad(1, 60, 60, 1830)) == pytest.approx(0.008)
    assert times.step_s(StepLoad(1, 60, 160, 60 * 100 + 1830)) == pytest.approx(0.009)
    assert times.step_s(StepLoad(1, 4, 4, 10)) == pytest.approx(0.0024)


def test_a_prompt_holds_up_the_rows_beside_it():
    load = StepLoad(5, 64, 60 + 400, 1830 + 400, 4, 400)
    assert DrawnTimes(TIMES, 0).step_s(load) == pytest.approx(0.0054 + 0.009)
    faster = replace(TIMES, beside_s=-TIMES.beside_s)
    assert DrawnTimes(faster, 0).step_s(load) == pytest.approx(0.0054)  # by noise: no step is shorter for it


def test_a_second_token_takes_longer_than_later_ones():
    """It is the first step in which a row decodes, whether it follows its prompt alone or others decode, too."""
    times, prompt, alone = DrawnTimes(TIMES, 0), StepLoad(1, 60, 60, 1830), StepLoad.decoding(1, 240)
    first = times.step_s(prompt)
    assert [first, times.step_s(alone), times.step_s(alone)] == pytest.approx([0.008, 0.00324, 0.00224])
    beside = StepLoad(2, 61, 60 + 240, 1830 + 240, 1, 240)  # one decodes on, another has its prompt
    both = StepLoad.decoding(2, 240)
    spans = [times.step_s(load) for load in (beside, both, both)]
    assert spans == pytest.approx([0.00224 + 0.009, 0.00348 + 0.001, 0.00348])


def test_what_was_measured_before_and_behind_counts_alike():
    """Steps are drawn from both, as far from the mean as two that say nothing of each other are."""
    slower = {field.name: 3 * getattr(TIMES, field.name) for field in fields(TIMES)}
    both = TIMES.and_then(MeasuredTimes(**slower))
    assert both.decode_s(2, 80) == pytest.approx(2 * TIMES.decode_s(2, 80))
    assert both.prompt_s(60, 0) == pytest.approx(2 * TIMES.prompt_s(60, 0))
    drawn = DrawnTimes(both, 0)
    prompts = [drawn.step_s(StepLoad(1, 60, 60, 1830)) for _ in range(200)]
    assert {round(seconds, 6) for seconds in prompts} == {round(0.016 + sign * 0.008 * 2**0.5, 6) for sign in (-1, 1)}
    decodes = [drawn.step_s(StepLoad.decoding(1, 240)) for _ in range(40)][1:]  # behind the second token
    assert len(set(decodes)) == 1  # noise lasts as long as an answer that was measured


def test_a_simulated_small_model_takes_its_steps():
    outcome = simulated(2, day_of(4.0, 3.0), "prefix+load", 0, TIMES)
    assert len(outcome.ends) > 5
    assert outcome.totals.busy_s > 0.002 * outcome.totals.num_steps


def test_every_simulated_step_is_drawn_once_and_in_order(monkeypatch):
    """What is drawn for a look ahead would be missing where it belongs."""
    drawn, draw = [], DrawnTimes.step_s

    def step_s(times, load):
        drawn.append(draw(times, load))
        return drawn[-1]

    monkeypatch.setattr(DrawnTimes, "step_s", step_s)
    outcome = simulated(2, day_of(4.0, 3.0), "prefix+load", 0, TIMES)
    assert len(drawn) == outcome.totals.num_steps
    assert sum(drawn) == pytest.approx(outcome.totals.busy_s)


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
