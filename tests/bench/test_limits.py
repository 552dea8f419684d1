"""The limit of a machine for a model: bytes and operations by hand, and the shares that follow."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jpaged.bench import limits
from jpaged.bench.limits import (
    HardwareLimits,
    ServedModel,
    of_accelerator,
    offline_shares,
    probe,
    serving_shares,
)
from jpaged.hardware import HARDWARE, find_hardware
from jpaged.plan.cost import ModelShape
from tests.bench.words import trace_of

SHAPE = ModelShape(
    num_params=1200, num_layers=2, query_width=16, weight_bytes=2400, kv_bytes_per_token=32, head_params=200
)
MODEL = ServedModel(SHAPE)
BY_BYTES, BY_FLOPS = HardwareLimits(1e6, 1e30, "test"), HardwareLimits(1e30, 1e6, "test")


def by_hand(prompt_len: int, output_len: int) -> tuple[int, int]:
    """FLOPs and bytes of keys and values of one request, a token at a time."""
    flops, kv_bytes = 0, 0
    for position in range(prompt_len + output_len - 1):
        flops += 2 * 1000 + 4 * 2 * 16 * (position + 1)
        if position >= prompt_len:  # a step of its own
            kv_bytes += 32 * (position + 1)
    return flops + output_len * 2 * 200, kv_bytes


def test_the_work_of_requests_is_that_of_their_tokens():
    lens = [(5, 4), (9, 1), (1, 7)]
    work = MODEL.work(lens, 3)
    assert work.flops == sum(by_hand(*one)[0] for one in lens)
    assert work.num_bytes == 3 * 2400 + sum(by_hand(*one)[1] for one in lens)


def test_decoding_rows_read_and_write_their_recurrent_state():
    lens = [(5, 4), (9, 1), (1, 7)]
    stateful = ServedModel(dataclasses.replace(SHAPE, state_bytes=50.0))
    assert stateful.work(lens, 3).num_bytes - MODEL.work(lens, 3).num_bytes == 2 * 50 * (3 + 0 + 6)


def test_a_run_reads_the_weights_as_often_as_its_steps_must():
    lens = [(5, 4)] * 6
    kv_bytes = 6 * by_hand(5, 4)[1]
    for max_num_seqs, num_steps in ((100, 4), (6, 4), (4, 6), (1, 24)):
        shares = offline_shares(MODEL, BY_BYTES, lens, max_num_seqs, elapsed_s=2.0)
        assert shares["limit_seconds"] == pytest.approx((num_steps * 2400 + kv_bytes) / 1e6)
        assert shares["mbu"] == shares["share_of_limit"] == pytest.approx(shares["limit_seconds"] / 2)
    by_flops = offline_shares(MODEL, BY_FLOPS, lens, 1, elapsed_s=2.0)
    assert by_flops["limit_seconds"] == pytest.approx(6 * by_hand(5, 4)[0] / 1e6)
    assert by_flops["mfu"] == by_flops["share_of_limit"] == pytest.approx(by_flops["limit_seconds"] / 2)


def test_a_served_step_reads_the_weights_and_every_open_streams_context():
    # Two streams side by side for a second, 11 tokens each: 10 steps of 0.1 s with two rows.
    traces = [trace_of(0.0, np.linspace(1, 2, 11).tolist(), prompt_len=100) for _ in range(2)]
    shares = serving_shares(MODEL, BY_BYTES, traces, 4.0)
    step_bytes = 2400 + 2 * (100 + 5.5) * 32
    assert shares["limit_tpot_ms"] == pytest.approx(1e3 * step_bytes / 1e6)
    assert shares["mbu"] == shares["share_of_limit"] == pytest.approx(step_bytes / 1e6 / 0.1)
    by_flops = serving_shares(MODEL, BY_FLOPS, traces, 4.0)
    assert by_flops["mfu"] == pytest.approx(2 * by_hand(100, 11)[0] / 1e6 / 4)
    assert by_flops["limit_tpot_ms"] == pytest.approx(1e3 * (2 * 2 * 1200 + 4 * 2 * 16 * 2 * 105.5) / 1e6)


def test_a_pause_between_streams_does_not_make_steps_of_fewer_rows():
    first = trace_of(0.0, np.linspace(1, 2, 11).tolist(), prompt_len=100)
    later = trace_of(50.0, np.linspace(51, 52, 11).tolist(), prompt_len=100)
    alone, both = (serving_shares(MODEL, BY_BYTES, traces, 60.0) for traces in ([first], [first, later]))
    assert both["mbu"] == pytest.approx(alone["mbu"])


def test_single_tokens_have_no_decode_step():
    shares = serving_shares(MODEL, BY_BYTES, [trace_of(0.0, [1.0])], 4.0)
    assert shares["mbu"] is shares["limit_tpot_ms"] is shares["share_of_limit"] is None


def test_a_token_of_a_mixture_is_multiplied_with_its_experts_alone():
    shape = dataclasses.replace(SHAPE, expert_params=800.0, expert_share=0.25)
    (prompt_len, output_len), rows = (5, 4), 2
    work = ServedModel(shape).work([(prompt_len, output_len)], 3, rows)
    flops, kv_bytes = by_hand(prompt_len, output_len)
    assert work.flops == flops - 2 * 600 * (prompt_len + output_len - 1)
    assert work.num_bytes == pytest.approx(3 * 2400 * (1 - 800 / 1200 * 0.75**rows) + kv_bytes)


def test_accelerators_are_those_of_the_table():
    assert [find_hardware(kind) for kind in ("TPU v6e", "NVIDIA H200", "TPU v1")] == [
        HARDWARE["tpu-v6e"],
        HARDWARE["h200"],
        None,
    ]
    assert all(find_hardware(kind) is device for device in HARDWARE.values() for kind in device.kinds)
    assert of_accelerator("h200", 2) == HardwareLimits(2 * 4800e9, 2 * 989e12, "data sheet of 2 x h200")


def test_the_probe_finds_what_this_machine_does(monkeypatch):
    monkeypatch.setattr(limits, "_PROBE_BYTES", 8 << 20)
    monkeypatch.setattr(limits, "_PROBE_WIDTH", 64)
    found = probe()
    assert found.bytes_per_s > 0
    assert found.flops_per_s > 0
