"""Synthetic traces have the paper's means, and files are refused by line and field."""

import json

import numpy as np
import pytest

from benchmarks.paper.point import chat_rounds
from jpaged.errors import InvalidArgument
from jpaged.plan.simulator.trace import (
    WORKLOADS,
    LengthDistribution,
    TraceRequest,
    TraceWorkload,
    read_trace,
    synthesize,
)


@pytest.mark.parametrize(("name", "prompt", "output"), [("sharegpt", 161.31, 337.99), ("alpaca", 19.31, 58.45)])
@pytest.mark.parametrize("seed", [0, 1])
def test_means_are_the_papers_within_one_percent(name, prompt, output, seed):
    trace = synthesize(WORKLOADS[name], rate_per_s=4.0, num_requests=2000, seed=seed, max_model_len=2048)
    assert np.mean([request.prompt_tokens for request in trace]) == pytest.approx(prompt, rel=0.01)
    assert np.mean([request.output_tokens for request in trace]) == pytest.approx(output, rel=0.01)
    assert max(request.prompt_tokens + request.output_tokens for request in trace) <= 2048
    assert trace[-1].arrival_s == pytest.approx(500.0)


def test_a_seed_is_a_trace():
    def draw(seed: int, rate: float) -> list[TraceRequest]:
        return synthesize(WORKLOADS["sharegpt"], rate_per_s=rate, num_requests=50, seed=seed, max_model_len=2048)

    assert draw(3, 1.0) == draw(3, 1.0)
    assert draw(3, 1.0) != draw(4, 1.0)
    assert [request.prompt_tokens for request in draw(3, 1.0)] == [request.prompt_tokens for request in draw(3, 2.0)]


def test_a_shared_prefix_comes_before_each_prompt():
    workload = TraceWorkload("shots", LengthDistribution(40.0, 0.5), LengthDistribution(40.0, 0.5), prefix_tokens=341)
    trace = synthesize(workload, rate_per_s=1.0, num_requests=100, seed=0, max_model_len=2048)
    assert {(request.prefix_id, request.prefix_tokens) for request in trace} == {("shared", 341)}
    assert np.mean([request.prompt_tokens for request in trace]) == pytest.approx(381, rel=0.01)


def test_a_chat_prompt_is_cut_to_its_last_tokens():
    trace = chat_rounds(rate_per_s=1.0, num_requests=300, seed=0)
    assert max(request.prompt_tokens for request in trace) == 1024
    assert max(request.output_tokens for request in trace) <= 1024
    assert all(request.prefix_tokens in (0, request.prompt_tokens) for request in trace)
    assert {bool(request.prefix_id) for request in trace} == {True, False}


def test_means_that_do_not_fit_are_refused():
    workload = TraceWorkload("long", LengthDistribution(400.0, 0.5), LengthDistribution(400.0, 0.5))
    with pytest.raises(InvalidArgument, match="max_model_len: 512 tokens are too few"):
        synthesize(workload, rate_per_s=1.0, num_requests=10, seed=0, max_model_len=512)


def test_a_file_is_read_by_arrival(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"arrival_s": 2, "prompt_tokens": 10, "output_tokens": 5, "tenant": "a", "priority": -1},
        {"arrival_s": 0.5, "prompt_tokens": 20, "output_tokens": 5, "prefix_id": "p", "prefix_tokens": 16, "n": 2},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert read_trace(path, max_model_len=2048) == [
        TraceRequest(0.5, 20, 5, n=2, prefix_id="p", prefix_tokens=16),
        TraceRequest(2, 10, 5, tenant="a", priority=-1),
    ]


GOOD = '{"arrival_s": 0, "prompt_tokens": 10, "output_tokens": 5}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "trace line 2: is not JSON"),
        ("[1]", "trace line 2: is not an object"),
        ('{"arrival_s": 0, "prompt_tokens": 10}', "trace line 2: output_tokens: is missing"),
        (GOOD[:-1] + ', "temperature": 1}', "trace line 2: temperature: is unknown; known fields: arrival_s"),
        (GOOD.replace("10", "0"), "trace line 2: prompt_tokens: 0 is out of range: must be at least 1"),
        (GOOD.replace("10", "1.5"), "trace line 2: prompt_tokens: 1.5 is not of type int"),
        (GOOD.replace("10", "true"), "trace line 2: prompt_tokens: True is not of type int"),
        (GOOD.replace(": 0", ": -1"), "trace line 2: arrival_s: -1 is out of range"),
        (GOOD.replace(": 0", ": NaN"), "trace line 2: arrival_s: nan is out of range"),
        (GOOD.replace(": 0", ": Infinity"), "trace line 2: arrival_s: inf is out of range"),
        (GOOD.replace("10", "2044"), "trace line 2: output_tokens: prompt and output are 2049, over 2048"),
        (GOOD[:-1] + ', "beam_width": 17}', "trace line 2: beam_width: 17 is out of range: must be from 0 to 16"),
        (GOOD[:-1] + ', "beam_width": 2, "n": 3}', r"trace line 2: n: 3 is over beam_width \(2\)"),
        (
            GOOD[:-1] + ', "prefix_id": "p"}',
            "trace line 2: prefix_id: prefix_id and prefix_tokens must be given together",
        ),
        (GOOD[:-1] + ', "prefix_id": "p", "prefix_tokens": 11}', r"line 2: prefix_tokens: 11 is over prompt_tokens"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path, line, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(InvalidArgument, match=message):
        read_trace(path, max_model_len=2048)


def test_an_empty_and_a_missing_file_are_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_trace(path, max_model_len=2048)
    path.write_text("\n")
    with pytest.raises(InvalidArgument, match="has no requests"):
        read_trace(path, max_model_len=2048)
