"""The tables of plans in docs/performance.md: written from the record, and estimated again without a compiler."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plans import (
    ANCHORS,
    CELLS,
    GOAL,
    GOOD_SHARE,
    PUBLISHED,
    WIDE,
    Anchor,
    anchor_record,
    anchors_table,
    beside_good_attention,
    command,
    estimated,
    flops_share,
    planned,
    published_table,
    table,
    wide_table,
)
from benchmarks.record import RESULTS
from jpaged.plan.cost import StepLoad
from jpaged.plan.estimate import ConcurrencyLimits, SequenceLengths, estimate

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "performance.md").read_text()
RECORD: dict[str, Any] = json.loads((RESULTS / "plans.json").read_text())
PLANS: list[dict[str, Any]] = RECORD["plans"]
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


def test_the_page_has_the_recorded_anchors() -> None:
    assert [one["source"] for one in RECORD["anchors"]] == [anchor.source for anchor in ANCHORS]
    assert anchors_table(RECORD["anchors"]) in PAGE
    for anchor, one in zip(ANCHORS, RECORD["anchors"], strict=True):
        assert anchor.tokens_per_s == one["tokens_per_s"]
        assert one["estimated_tokens_per_s"] == pytest.approx(anchor_record(anchor)["estimated_tokens_per_s"])


def test_a_goal_is_reached_if_steps_take_as_long_as_they_may() -> None:
    (anchor,) = (anchor for anchor in ANCHORS if anchor.lengths.output_len == 73 and anchor.tokens_per_s > 5500)
    one, found = anchor.estimate()[0], anchor_record(anchor)
    assert found["slowdown"] < 1
    prefills = one.num_running * anchor.lengths.input_len / anchor.num_tokens
    seconds = found["slowdown"] * (prefills * one.prefill.seconds + anchor.lengths.output_len * one.decode.seconds)
    assert one.num_running * anchor.lengths.output_len / seconds == pytest.approx(GOAL * anchor.tokens_per_s)
    # Without counted cycles the estimate itself is shares of both peaks.
    assert found["estimated_decode_bandwidth_share"] == pytest.approx(0.7)
    assert found["estimated_prefill_flops_share"] == pytest.approx(0.5)
    assert found["decode_bandwidth_share"] == pytest.approx(0.7 / found["slowdown"])


def test_products_in_8_bit_floats_have_twice_the_peak() -> None:
    sizes = ("h100", SequenceLengths(778, 73), 512, 2048, 1.0, "nowhere")
    plain, fp8 = (Anchor("llama-3.1-8b", *sizes, quantization=name).estimate()[1] for name in ("auto", "fp8"))
    assert plain.roofline.shape.fp8_share == 0.0
    assert fp8.roofline.shape.fp8_share == pytest.approx(1.0, abs=1e-3)
    load = StepLoad.decoding(2048, 0)
    shape = plain.roofline.shape
    of_layers, of_head = (2 * params * 2048 / (989e12 * 0.5) for params in (shape.token_params, shape.head_params))
    assert plain.roofline.flops_s(load) == pytest.approx(of_layers + of_head)
    assert fp8.roofline.flops_s(load) == pytest.approx(of_layers / 2 + of_head, rel=1e-3)
    assert "(twice that for the 100% of the layers' parameters" in fp8.assumptions(512)[0]
    before_hopper = dataclasses.replace(Anchor("llama-3.1-8b", *sizes, quantization="fp8"), topology="a100")
    assert before_hopper.estimate()[1].roofline.shape.fp8_share == 0.0


@pytest.mark.long
def test_latents_of_all_devices_are_planned_for_each_target() -> None:
    """Each target before and after: the pool grows with the devices, and fewer bytes are sent for a row."""
    wide = [json.loads(json.dumps(one.record())) for one in WIDE]
    assert wide == RECORD["wide"]
    assert wide_table(wide) in PAGE
    assert {one["devices"] for one in wide} == {"v6e:8x8", "h200:8", "h200:16"}
    for before, after in zip(wide[::2], wide[1::2], strict=True):
        assert (before["devices"], before["lengths"]) == (after["devices"], after["lengths"])
        assert (before["has_dp_attention"], after["has_dp_attention"]) == (False, True)
        assert after["pool_tokens"] > 5 * before["pool_tokens"]
        assert after["sent_bytes"] / after["num_running"] < before["sent_bytes"] / before["num_running"]
        has_rows_for_all = after["num_running"] >= after["num_devices"]  # else products read more weights
        assert (after["decode_tokens_per_s_of_device"] > before["decode_tokens_per_s_of_device"]) == has_rows_for_all
    assert all(one["source"] for one in wide if one["published"] is not None)
