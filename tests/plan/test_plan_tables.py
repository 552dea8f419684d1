"""The tables of plans in docs/performance.md: written from the record, and estimated again without a compiler."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plans import (
    CELLS,
    GOOD_SHARE,
    PUBLISHED,
    beside_good_attention,
    command,
    estimated,
    flops_share,
    planned,
    published_table,
    table,
)
from benchmarks.record import RESULTS
from jpaged.plan.estimate import ConcurrencyLimits, SequenceLengths, estimate

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "performance.md").read_text()
PLANS: list[dict[str, Any]] = json.loads((RESULTS / "plans.json").read_text())["plans"]
LLAMA_70B = next(found for found in PLANS if found["model"] == "llama-3.1-70b" and found["fits"])


def test_the_page_has_the_recorded_plans() -> None:
    assert [found["command"] for found in PLANS] == [" ".join(command(*cell)) for cell in CELLS]
    assert table(PLANS) in PAGE


def test_every_published_figure_has_a_plan_and_a_line_on_the_page() -> None:
    lines = published_table(PLANS).splitlines()[2:]
    for figure, line in zip(PUBLISHED, lines, strict=True):
        beginning = f"| {figure.model} | {figure.topology} | {figure.lengths.input_len} + {figure.lengths.output_len} |"
        assert line.startswith(beginning)
        assert f"| {figure.requests_per_s:.2f} |" in line
        assert beginning in PAGE


def test_estimates_are_made_again_from_the_memory_of_the_record() -> None:
    more = {**LLAMA_70B, "num_blocks": 2 * LLAMA_70B["num_blocks"], "max_num_seqs": 4096}
    (before,), (after,) = estimated(LLAMA_70B)["estimates"], estimated(more)["estimates"]
    blocks_per_seq = -(-1280 // LLAMA_70B["block_size"])
    assert before["num_fitting"] == LLAMA_70B["num_blocks"] // blocks_per_seq
    assert after["num_running"] == more["num_blocks"] // blocks_per_seq
    assert after["decode_s"] > before["decode_s"]
    refused = {**LLAMA_70B, "fits": False}
    assert estimated(refused) == refused


def test_a_step_whose_attention_is_as_good_as_the_best_is_beside_itself() -> None:
    times = planned(LLAMA_70B).step_times()
    sizes = ConcurrencyLimits(10_000, 128, 64, 1024)
    one = estimate(SequenceLengths(1000, 200), sizes, times)
    token_bytes = LLAMA_70B["memory_of_one_device"]["bytes_per_block"] / LLAMA_70B["block_size"]
    good_s = 64 * 1100 * token_bytes / (GOOD_SHARE * 1638e9)
    good = dataclasses.replace(one, decode=dataclasses.replace(one.decode, attention_s=good_s))
    assert beside_good_attention(good, times) == pytest.approx(1.0)
    slower = dataclasses.replace(one.decode, attention_s=good_s + good.decode.seconds)
    assert beside_good_attention(dataclasses.replace(one, decode=slower), times) == pytest.approx(2.0)


def test_the_share_of_the_peak_is_products_and_half_of_the_scores() -> None:
    times = planned(LLAMA_70B).step_times()
    one = estimate(SequenceLengths(1024, 256), ConcurrencyLimits(10_000, 128, 64, 2048), times)
    shape = times.roofline.shape
    flops = 2 * (shape.num_params - shape.head_params) * 2048 + 2 * shape.head_params * 2
    flops += 4 * shape.num_layers * shape.query_width * 2048 * 512
    assert flops_share(one, times, 2048) == pytest.approx(flops / (8 * 918e12 * one.prefill.seconds))
