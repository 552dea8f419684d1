"""The paper's evaluation: points run once, tables are saved whole, every system is one the engine knows."""

import csv
import json
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

import jpaged
from benchmarks.paper import blocks, canvas, plots, rates, runner
from benchmarks.paper.batches import Pool, batch_size, region_tokens
from benchmarks.paper.point import (
    AT_ONCE,
    LABELS,
    LEAST_BATCHES,
    SYSTEMS,
    Measured,
    Point,
    PoolShares,
    in_batch,
    measure,
    steady_latency_s,
    trace,
)
from benchmarks.paper.runner import Runner
from benchmarks.paper.spread import Spread, ratio
from benchmarks.paper.table import RESULTS, Table
from jpaged.errors import InternalError
from jpaged.plan.simulator.simulation import ExecutorObservation, SimulatedStep, SimulatedTimes, Simulation
from jpaged.plan.simulator.trace import TraceRequest
from jpaged.server_load import EngineLoad

SMALL = Point("max", "alpaca", num_batches=1.0)


@pytest.mark.long
def test_a_point_runs_once_and_in_processes_as_in_this_one():
    points = [SMALL, replace(SMALL, system="oracle", num_batches=0.2)]
    one = Runner(1)
    first = one.run(points)
    assert one.run(points)[SMALL] is first[SMALL]
    assert Runner(2).run(points) == first
    assert first[SMALL] != measure(replace(SMALL, seed=1))


def test_a_run_that_was_cut_short_goes_on_where_it_was(tmp_path, monkeypatch):
    first = Runner(1, tmp_path).run([SMALL])
    monkeypatch.setattr(runner, "measure", lambda point: pytest.fail(f"{point} was measured again"))
    assert Runner(1, tmp_path).run([SMALL]) == first
    measured = []

    def count(point):
        measured.append(point)
        return first[SMALL]

    monkeypatch.setattr(runner, "code_digest", lambda: "other code")
    monkeypatch.setattr(runner, "measure", count)
    Runner(1, tmp_path).run([SMALL, replace(SMALL, seed=1)])
    assert measured == [SMALL, replace(SMALL, seed=1)]


@pytest.mark.parametrize("changed", ["types.py", "testing/virtual_clock.py", "engine/scheduler/scheduler.py"])
def test_what_was_kept_is_of_one_state_of_the_package(changed, tmp_path, monkeypatch):
    for name in ("__init__.py", "types.py", "testing/virtual_clock.py", "engine/scheduler/scheduler.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    monkeypatch.setattr(jpaged, "__file__", str(tmp_path / "__init__.py"))
    digest = runner.code_digest.__wrapped__
    before = digest()
    assert digest() == before
    (tmp_path / changed).write_text("x = 2\n")
    assert digest() != before


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.long
def test_every_system_serves(system):
    batches = 0.2 if system in ("paged", "shared", "jpaged") else 2.0
    result = measure(Point(system, "translation", model="llama-13b", prefix_tokens=80, num_batches=batches))
    assert result.sustained_per_s > 0
    assert (result.num_prefix_hit_tokens > 0) == (system in ("shared", "jpaged"))
    assert set(LABELS) <= set(SYSTEMS)


REQUEST = TraceRequest(0.0, 100, 30)


@pytest.mark.parametrize(
    ("policy", "tokens", "held"),
    [
        ("reserve-oracle", 130, 256),  # 9 blocks, rounded up to 16
        ("reserve-pow2", 132, 256),
        ("reserve-max", 2048, 2048),
        ("paged", None, 100 + 15 + 8),  # on average half of the output, and half of a block
    ],
)
def test_a_batch_is_what_the_pool_holds(policy, tokens, held):
    pool = Pool(num_slots=16_384, block_size=16, max_num_seqs=256, max_model_len=2048)
    if tokens is not None:
        assert region_tokens(policy, REQUEST, 2048) == tokens
    assert batch_size([REQUEST], policy, pool) == pytest.approx(16_384 / held)
    assert batch_size([REQUEST], policy, replace(pool, max_num_seqs=5)) == 5.0
    assert batch_size([replace(REQUEST, n=2)], "reserve-max", pool) == 4.0


def test_a_long_request_weighs_by_the_steps_that_it_stays():
    pool = Pool(num_slots=16_384, block_size=16, max_num_seqs=256, max_model_len=2048)
    # Regions of 64 for 20 steps and of 256 for 180: (64 * 20 + 256 * 180) / 200 = 236.8
    some = [TraceRequest(0.0, 40, 20), TraceRequest(0.0, 60, 180)]
    assert batch_size(some, "reserve-oracle", pool) == pytest.approx(16_384 / 236.8)


def test_a_trace_has_the_batches_that_were_asked_for():
    assert len(trace(replace(SMALL, num_batches=27.0))) == 207  # 27 * 15 700 / 2048
    assert trace(SMALL) == trace(SMALL) != trace(replace(SMALL, seed=1))


def test_latency_leaves_out_the_first_fifth_and_the_last_tenth():
    served = [SimulatedTimes(TraceRequest(0.0, 1, 10), 1.0, 10.0 * i) for i in range(10)]
    assert steady_latency_s(served) == pytest.approx(sum(range(2, 9)) / 7)


def test_what_a_batch_holds_is_a_mean_over_the_window():
    steps = tuple(
        SimulatedStep(float(i), 1.0, 1, 0, int(i % 2 == 0 and i < 8), 1, ExecutorObservation(1, 1, 0, False))
        for i in range(9)
    )
    # Admitted at 0, 2, 4 and 6, each for two seconds and one: half of the time two of them run. The window is 1 to 7.
    served = tuple(SimulatedTimes(TraceRequest(0.0, 1, 3), 2.0 * i + 1, 2.0 * i + 3) for i in range(4))
    result = Simulation(served, 9.0, steps, 0.0, 0.0, 0.0, 0.0, EngineLoad(block_size=16))
    assert (result.window.begin_s, result.window.end_s) == (1.0, 7.0)
    assert in_batch(result, lambda one: 10) == pytest.approx(10 * (2 + 3 + 3 + 1) / 6)


@pytest.mark.long
@pytest.mark.parametrize("system", ["max", "pow2", "oracle", "paged"])
def test_the_parts_of_the_pool_are_all_of_it(system):
    shares = measure(Point(system, "sharegpt", num_batches=2.0)).pool_shares
    assert shares is not None
    parts = (shares.tokens, shares.reserved, shares.internal, shares.external)
    assert sum(parts) == pytest.approx(1.0)
    assert min(parts) >= 0.0
    if system == "max":
        assert shares.external == pytest.approx(1 - 7 * 2048 / (981 * 16), abs=0.03)
    if system == "paged":
        assert 0 < shares.reserved < 0.1 * shares.tokens  # half a block of each


def test_seeds_are_told_as_a_mean_and_its_extremes():
    assert Spread.of([1.0, 2.0, 6.0]) == Spread(3.0, 1.0, 6.0)
    assert Spread(3.0, 1.0, 6.0).cells("rate") == {"rate": 3.0, "rate_low": 1.0, "rate_high": 6.0}
    # Seed by seed: 2 and 4, not 9 / 3.
    assert ratio({0: 2.0, 1: 8.0}, {0: 1.0, 1: 2.0}) == Spread(3.0, 2.0, 4.0)


def test_a_baselines_row_has_the_ratio_and_another_has_none():
    some = [replace(NOTHING, sustained_per_s=rate) for rate in (1.0, 4.0)]
    over = {"paged_over_it": 3.0, "paged_over_it_low": 2.0, "paged_over_it_high": 4.0}
    assert rates.over_baseline({0: 4.0, 1: 8.0}, "max", some) == over
    assert rates.over_baseline({0: 4.0, 1: 8.0}, "paged", some) == dict.fromkeys(over)


NOTHING = Measured(0, 0.0, 0.0, 0.0, 0.0, False, None, 0.0, 0.0, 0.0, 0, 0, 0)


def test_a_rate_of_too_few_batches_is_refused():
    with pytest.raises(InternalError, match="batches, below 20"):
        rates.saturated(Runner(1), SMALL, ("max",), (0,))


def test_what_sustains_and_shares_was_measured_where_it_is_steady():
    for name in ("f12_sustained", "f15_shared_blocks", "f16_shared_prefix", "f17_chatbot"):
        rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        # Six beams of ShareGPT's lengths are told with the one batch that they are measured on.
        too_long = [
            row for row in rows if (row.get("workload"), row.get("kind"), row.get("size")) == ("sharegpt", "beam", 6)
        ]
        assert min(row["batches"] for row in rows if row not in too_long) >= LEAST_BATCHES, name


def test_a_lighter_load_is_a_shorter_trace():
    light = rates.at_share(Point("max", "alpaca"), 4.0, 0.5)
    assert (light.rate_per_s, light.num_batches) == (2.0, 13.5)
    assert rates.at_share(Point("max", "alpaca"), 4.0, 1.2).num_batches == Point("max", "alpaca").num_batches
    assert Point("max", "alpaca").rate_per_s == AT_ONCE


def test_a_table_is_saved_whole(tmp_path):
    table = Table("t", "a title", ["a note"], {"seed": 0})
    table.add(system="paged", paper=None, ours=1 / 3)
    table.add(system="oracle", paper=132.44, ours=132.44)
    table.save(tmp_path)
    with (tmp_path / "t.csv").open() as file:
        assert list(csv.DictReader(file)) == [
            {"system": "paged", "paper": "", "ours": "0.3333"},
            {"system": "oracle", "paper": "132.44", "ours": "132.4"},
        ]
    saved = json.loads((tmp_path / "t.json").read_text())
    assert saved["rows"] == [
        {"system": "paged", "paper": None, "ours": 0.3333},
        {"system": "oracle", "paper": 132.44, "ours": 132.4},
    ]
    assert (saved["notes"], saved["settings"]) == (["a note"], {"seed": 0})
    assert {"jpaged", "python", "numpy"} == set(saved["versions"])
    assert "a note" in str(table)


def test_swapping_small_blocks_costs_more_than_recomputing_and_large_ones_less():
    ratios = {
        row["block_size"]: float(str(row["swap_both_ms"])) / float(str(row["recompute_ms"]))
        for row in blocks.preemption_costs().rows
    }
    assert ratios[1] > 5
    assert ratios[256] < 1


def test_a_colour_means_one_thing():
    colors = [shade for shade, _ in canvas.STYLES.values()]
    assert len(set(colors)) == len(colors)
    assert set(LABELS) <= set(canvas.STYLES)
    assert set(PoolShares.__slots__) <= set(canvas.STYLES)


def test_a_ratios_number_stands_above_its_whisker():
    rows = json.loads((RESULTS / "f12_sustained.json").read_text())["rows"]
    (ax,) = plots._sustained(rows).axes
    tops = sorted(row["paged_over_it_high"] for row in rows if row["paged_over_it_high"])
    labels = sorted(text.get_position()[1] for text in ax.texts)
    assert len(labels) == len(tops)
    assert all(label > top for label, top in zip(labels, tops, strict=True))


@pytest.mark.long
def test_every_table_that_is_kept_has_its_picture_with_labelled_axes(monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append((figure, path.stem, dpi)))
    plots.draw_all()
    tables = {path.stem for path in RESULTS.glob("f*.json")}
    assert {name for _, name, _ in drawn} == tables
    assert {dpi for _, _, dpi in drawn} == {160}
    for figure, name, _ in drawn:
        for ax in figure.axes:
            assert ax.get_ylabel() or not ax.get_visible(), name
