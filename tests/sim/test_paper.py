"""The paper's evaluation: points run once, tables are saved whole, every system is one the engine knows."""

import csv
import json

import pytest

from benchmarks.paper import blocks
from benchmarks.paper.point import LABELS, SYSTEMS, Point, Runner
from benchmarks.paper.table import Table


def test_a_point_runs_once_and_in_processes_as_in_this_one():
    points = [Point("paged", "alpaca", 20.0, 12), Point("oracle", "alpaca", 20.0, 12)]
    runner = Runner(1)
    first = runner.run(points)
    assert runner.run(points)[points[0]] is first[points[0]]
    assert Runner(2).run(points) == first
    assert first[points[0]].slot_share > first[points[1]].slot_share


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_serves(system):
    point = Point(system, "translation", 50.0, 6, "llama-13b", prefix_tokens=80)
    result = Runner(1).run([point])[point]
    assert result.saturated_requests_per_s > 0
    assert (result.num_prefix_hit_tokens > 0) == (system in ("shared", "jpaged"))
    assert set(LABELS) <= set(SYSTEMS)


def test_a_table_is_saved_whole(tmp_path):
    table = Table("t", "a title", ["a note"], {"seed": 0})
    table.add(system="paged", paper=None, ours=1 / 3)
    table.save(tmp_path)
    with (tmp_path / "t.csv").open() as file:
        assert list(csv.DictReader(file)) == [{"system": "paged", "paper": "", "ours": "0.3333"}]
    saved = json.loads((tmp_path / "t.json").read_text())
    assert saved["rows"] == [{"system": "paged", "paper": None, "ours": 0.3333}]
    assert (saved["notes"], saved["settings"]) == (["a note"], {"seed": 0})
    assert "a note" in str(table)


def test_swapping_small_blocks_costs_more_than_recomputing_and_large_ones_less():
    ratios = {
        row["block_size"]: float(str(row["swap_both_ms"])) / float(str(row["recompute_ms"]))
        for row in blocks.preemption_costs().rows
    }
    assert ratios[1] > 5
    assert ratios[256] < 1
