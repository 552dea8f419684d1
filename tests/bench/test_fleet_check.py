"""The parts of `python -m benchmarks.fleet` that no server is needed for."""

import asyncio
import json
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from benchmarks.fleet import __main__ as command
from benchmarks.fleet import probes
from benchmarks.fleet.__main__ import DAYS
from benchmarks.fleet.check import day_of, simulated
from benchmarks.fleet.drive import Measured
from benchmarks.fleet.neighbours import Beside, Processors
from benchmarks.fleet.page import page_texts
from benchmarks.fleet.times import DECODE_CONTEXTS, NUM_TOKENS, PROMPT_CONTEXTS, ROWS, SIZES, DrawnTimes, MeasuredTimes
from benchmarks.record import PAGE, RESULTS
from jpaged.plan.cost import StepLoad
from jpaged.plan.fleet.outcomes import itl_s
from jpaged.plan.fleet.topology import START_S

TIMES = MeasuredTimes(
    np.array([[[0.001 * (1 + rows) + 1e-6 * rows * context] for context in DECODE_CONTEXTS] for rows in ROWS]),
    np.array([[[0.002 + 1e-4 * size + 1e-5 * context] for context in PROMPT_CONTEXTS] for size in SIZES]),
    np.array([[[0.003 + 1e-4 * size + 1e-5 * context] for context in PROMPT_CONTEXTS] for size in SIZES]),
    np.array([[0.001] for _ in DECODE_CONTEXTS]),
    np.array([[1.0], [1.5], [2.0], [3.0]]),
    np.array([[1.0], [1.25], [2.5], [4.0]]),
)


def drawn(times=TIMES, seed=0, *, place=0, processors=None, clock=lambda: 0.0):
    """Times of one server of four on two processors, which are at nothing unless they are told."""
    return DrawnTimes(times, seed, processors or Processors(4, 2, 0.005), place, clock)


def test_steps_take_what_was_measured():
    times = drawn()
    assert times.step_s(StepLoad.decoding(1, 240)) == pytest.approx(0.00224)
    assert times.step_s(StepLoad.decoding(3, 100)) == pytest.approx(0.0043)
    assert times.step_s(StepLoad.decoding(1, 1000)) == pytest.approx(0.003)  # beyond what was measured
    assert times.step_s(StepLoad(1, 60, 60, 1830)) == pytest.approx(0.008)
    assert times.step_s(StepLoad(1, 60, 160, 60 * 100 + 1830)) == pytest.approx(0.009)
    assert times.step_s(StepLoad(1, 4, 4, 10)) == pytest.approx(0.0024)


def test_a_prompt_holds_up_the_rows_beside_it():
    load = StepLoad(5, 64, 60 + 400, 1830 + 400, 4, 400)
    assert drawn().step_s(load) == pytest.approx(0.0054 + 0.009)
    faster = replace(TIMES, beside_s=-TIMES.beside_s)
    assert drawn(faster).step_s(load) == pytest.approx(0.0054)  # by noise: no step is shorter for it


def test_a_second_token_takes_longer_than_later_ones():
    """It is the first step in which a row decodes, whether it follows its prompt alone or others decode, too."""
    times, prompt, alone = drawn(), StepLoad(1, 60, 60, 1830), StepLoad.decoding(1, 240)
    first = times.step_s(prompt)
    assert [first, times.step_s(alone), times.step_s(alone)] == pytest.approx([0.008, 0.00324, 0.00224])
    beside = StepLoad(2, 61, 60 + 240, 1830 + 240, 1, 240)  # one decodes on, another has its prompt
    both = StepLoad.decoding(2, 240)
    spans = [times.step_s(load) for load in (beside, both, both)]
    assert spans == pytest.approx([0.00224 + 0.009, 0.00348 + 0.001, 0.00348])


def test_what_was_measured_before_and_behind_counts_alike():
    """Steps are drawn from both, as far from the mean as two that say nothing of each other are."""
    slower = {field.name: 2 * getattr(TIMES, field.name) for field in fields(TIMES)}
    both = TIMES.and_then(MeasuredTimes(**slower))
    assert both.decode_s(2, 80) == pytest.approx(1.5 * TIMES.decode_s(2, 80))
    assert both.prompt_s(60, 0) == pytest.approx(1.5 * TIMES.prompt_s(60, 0))
    server = drawn(both)
    prompts = [server.step_s(StepLoad(1, 60, 60, 1830)) for _ in range(200)]
    assert {round(seconds, 6) for seconds in prompts} == {round(0.012 + sign * 0.004 * 2**0.5, 6) for sign in (-1, 1)}
    decodes = [server.step_s(StepLoad.decoding(1, 240)) for _ in range(40)][1:]  # behind the second token
    assert len(set(decodes)) == 1  # noise lasts as long as an answer that was measured


@pytest.mark.parametrize(
    ("busy", "beside"),
    [
        ((), Beside.NOBODY),
        ((1,), Beside.OTHER_PROCESSOR),
        ((3,), Beside.OTHER_PROCESSOR),
        ((1, 3), Beside.OTHER_PROCESSOR),
        ((2,), Beside.SAME_PROCESSOR),
        ((2, 3), Beside.BOTH),
        ((0,), Beside.NOBODY),
    ],
)
def test_steps_take_longer_beside_servers_that_are_at_work(busy, beside):
    processors = Processors(4, 2, late_s=0.005)
    for place in busy:
        processors.works(place, 1.0, 0.002)
    assert processors.beside(0, 1.006) is beside
    load, prompt = StepLoad.decoding(1, 240), StepLoad(1, 60, 60, 1830)
    spans = [drawn(processors=processors, clock=lambda: 1.006).step_s(one) for one in (load, prompt)]
    decodes, prompts = TIMES.slower_decodes[beside, 0], TIMES.slower_prompts[beside, 0]
    assert spans == pytest.approx([0.00224 * decodes, 0.008 * prompts])


def test_a_server_sees_what_others_did_a_window_before():
    """However far ahead of it they are, and whichever of them is simulated first."""
    processors = Processors(2, 2, late_s=0.005)
    for begin_s, seconds in ((1.0, 0.002), (1.002, 0.001), (1.004, 0.001), (1.0095, 0.02)):
        processors.works(1, begin_s, seconds)
    times_s = np.arange(1.004, 1.04, 0.0005) + 0.00025
    seen = [processors.beside(0, now_s) is Beside.OTHER_PROCESSOR for now_s in times_s]
    at_s = times_s - 0.005
    spans = ((1.0, 1.003), (1.004, 1.005), (1.0095, 1.0295))
    was_busy = np.any([(at_s >= begin_s) & (at_s < end_s) for begin_s, end_s in spans], axis=0)
    assert seen == was_busy.tolist()
    processors.works(1, 2.0, 0.001)
    assert processors.beside(0, 1.02) is Beside.NOBODY  # forgotten: nobody is so late


def test_what_a_turn_takes_beside_others_is_drawn_from_the_measured_ones():
    slower = np.array([[1.0, 1.0], [1.2, 1.8], [2.0, 2.0], [3.0, 3.0]])
    times, processors = replace(TIMES, slower_decodes=slower), Processors(2, 2, late_s=0.005)
    processors.works(1, 0.0, 10.0)
    server = drawn(times, processors=processors, clock=lambda: 5.0)
    spans = [server.step_s(StepLoad.decoding(1, 240)) for _ in range(400)]
    assert {round(seconds / 0.00224, 6) for seconds in spans} == {1.2, 1.8}
    changes = [at for at in range(1, 400) if spans[at] != spans[at - 1]]
    assert all(at % 40 == 0 for at in changes)  # one for as many tokens as a measured turn has


async def test_probes_find_what_servers_take_alone_and_beside_others(monkeypatch):
    """Steps, second tokens, what prompts hold up, and each company's factor, of servers that take exactly so long."""
    server, clients = Stub(), list[Any]("abcd")
    for name, value in {"_ask": server.ask, "_PAUSE_S": 0.0, "_TURN_S": 0.0}.items():
        monkeypatch.setattr(probes, name, value)
    times = await probes.probe(clients, 2, 1, 0)
    for found, expected in (
        (times.decodes_s, Stub.STEP_S),
        (times.prompts_s, Stub.PROMPT_S),
        (times.beside_s, Stub.HELD_UP_S),
        (times.second_tokens_s, Stub.SECOND_S),
    ):
        assert found == pytest.approx(np.full_like(found, expected))
    factors = np.array([[1.0], [1.5], [2.0], [3.5]])
    assert times.slower_decodes == pytest.approx(np.repeat(factors, times.slower_decodes.shape[1], axis=1))
    assert times.slower_prompts == pytest.approx(np.repeat(factors, times.slower_prompts.shape[1], axis=1))
    assert not server.busy
    few = await probes.probe(clients[:2], 2, 1, 0)
    assert few.slower_decodes[:, 0] == pytest.approx([1.0, 1.5, 1.0, 1.0])  # no two servers share a CPU


class Stub:
    """Servers a, b, c and d on two CPUs, of which the first is asked: a and c share one."""

    STEP_S, SECOND_S, PROMPT_S, HELD_UP_S = 0.0001, 0.00015, 0.0006, 0.0004

    def __init__(self):
        self.busy = Counter[str]()
        self.num_prompts = self.num_long = 0
        self.all_came = asyncio.Event()

    async def ask(self, client, ids, num_tokens):
        self.busy[client] += 1
        try:
            before = self.num_prompts
            for _ in range(20):  # the others have begun, and what comes beside an answer comes within it
                await asyncio.sleep(0)
            others = "".join(sorted({*self.busy} - {"a"}))
            slower = {"": 1.0, "b": 1.5, "c": 2.0, "bc": 3.5}[others]
            if num_tokens == 1:
                self.num_prompts += self.busy["a"] > 1
                if self.num_prompts == before + 1 and not self.num_prompts % 3:
                    self.all_came.set()
            elif num_tokens > NUM_TOKENS:
                self.num_long += 1
                if not self.num_long % 2:  # each is asked for alone before
                    await self.all_came.wait()
                    self.all_came.clear()
            held_up_s = (self.num_prompts - before) * self.HELD_UP_S * (num_tokens > 1)
            answer_s = self.SECOND_S + (num_tokens - 1) * self.STEP_S + held_up_s
            return Measured(slower * self.PROMPT_S, slower * answer_s / max(1, num_tokens - 1), num_tokens, len(ids))
        finally:
            self.busy -= Counter([client])


def test_a_simulated_small_model_takes_its_steps():
    outcome = simulated(2, 2, day_of(4.0, 3.0), "prefix+load", 0, TIMES)
    assert len(outcome.ends) > 5
    assert outcome.totals.busy_s > 0.002 * outcome.totals.num_steps


@pytest.mark.long
def test_simulated_servers_slow_one_another_down():
    calm = replace(TIMES, slower_decodes=np.ones((4, 1)), slower_prompts=np.ones((4, 1)))
    days = [simulated(2, 2, day_of(4.0, 12.0), "prefix+load", 0, times) for times in (calm, TIMES)]
    alone_s, beside_s = (itl_s(day.ends).mean() for day in days)
    assert 1.02 * alone_s < beside_s < 1.5 * alone_s


def test_every_simulated_step_is_drawn_once_and_in_order(monkeypatch):
    """What is drawn for a look ahead would be missing where it belongs."""
    taken, draw = [], DrawnTimes.step_s

    def step_s(times, load):
        taken.append(draw(times, load))
        return taken[-1]

    monkeypatch.setattr(DrawnTimes, "step_s", step_s)
    outcome = simulated(2, 2, day_of(4.0, 3.0), "prefix+load", 0, TIMES)
    assert len(taken) == outcome.totals.num_steps
    assert sum(taken) == pytest.approx(outcome.totals.busy_s)


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
    rounds = next(one["rounds"] for one in starts if (one["start"], one["way"]) == ("cold", "in-need"))
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
