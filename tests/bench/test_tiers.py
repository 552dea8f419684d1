"""The benchmark of tiers: its table, its pool, and what it does to the page cache."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import PAGE, RESULTS
from benchmarks.tiers.kills import Kills, table
from benchmarks.tiers.pages import drop, resident, warm
from benchmarks.tiers.server import num_findable, pool_blocks
from benchmarks.tiers.table import STATES, WAYS, tables


def seed(ttft_s: dict[str, float], num_found: int) -> dict[str, Any]:
    gaps = {"p50_ms": 4.0, "p99_ms": 9.0, "max_ms": 12.0}
    first = {way: [{"ttft_s": ttft_s[way], "cached_tokens": num_found}] for way in WAYS}
    return {"first": first, "streams": {state: {"first": [{"ttft_s": 1.5}], "gaps": gaps} for state in STATES}}


def test_a_table_has_medians_their_spread_and_the_least_that_was_found() -> None:
    quick = {"computed": 2.0, "host": 0.1, "disk_warm": 0.2, "disk_cold": 0.4}
    slow = {way: 2 * ttft_s for way, ttft_s in quick.items()}
    lines = tables(4000, 24_576_000, {"0": seed(quick, 3984), "1": seed(slow, 3968)}).splitlines()
    assert lines[0].startswith("| where 4000 tokens are, 23 MiB |")
    assert "| 3.000 ± 1.000 s |  |" in lines[2]
    assert [line for line in lines if "5.0 x" in line and "| 0.600 ± 0.200 s |" in line and "| 3968 |" in line]
    assert lines[-1] == "| such prompts are computed | 4.0 ± 0.0 ms | 9.0 ± 0.0 ms | 12.0 ± 0.0 ms | 1.50 ± 0.00 s |"
    assert lines[-3].endswith("| 12.0 ± 0.0 ms |  |")


@pytest.mark.parametrize(("length", "num_streams"), [(4000, 4), (1000, 2), (4080, 10)])
def test_two_prompts_push_a_third_out_of_the_pool(length: int, num_streams: int) -> None:
    num_blocks, per_prompt = pool_blocks(length, num_streams, 384), -(-length // 16)
    assert per_prompt + num_streams * 24 <= num_blocks < 2 * per_prompt


def test_streams_that_need_more_than_a_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match="12 streams of 384 tokens"):
        pool_blocks(4000, 12, 384)


@pytest.mark.parametrize(("length", "found"), [(4000, 3984), (4001, 4000), (16, 0), (17, 16)])
def test_the_last_token_of_a_prompt_is_never_found(length: int, found: int) -> None:
    assert num_findable(length) == found


def test_files_are_read_into_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "identity").mkdir()
    (tmp_path / "identity" / "0.blocks").write_bytes(bytes(1 << 16))
    (tmp_path / "LOCK").write_bytes(bytes(1 << 20))
    warm(tmp_path)
    assert resident(tmp_path) == 1.0


def test_what_stays_in_memory_is_not_called_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0.blocks").write_bytes(bytes(1 << 16))
    monkeypatch.setattr("benchmarks.tiers.pages.os.posix_fadvise", lambda *_: None)
    with pytest.raises(SystemExit, match="stay in the page cache"):
        drop(tmp_path)


def test_a_folder_without_blocks_is_neither_cold_nor_warm(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no file"):
        resident(tmp_path)


def test_the_page_has_the_kills_that_are_recorded() -> None:
    record = json.loads((RESULTS / "tier_kills.json").read_text())
    done = Kills(**{field.name: record[field.name] for field in fields(Kills)})
    assert f"<!-- kills: begin -->\n{table(done)}\n<!-- kills: end -->" in PAGE.read_text()
    assert f"| {done.answers:,} |" in table(done)
