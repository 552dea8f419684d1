"""Two results side by side: ratios, which one is better, and what keeps them from being comparable."""

import json
from pathlib import Path
from typing import Any

import pytest

from jpaged.bench.results import compare, read_result
from jpaged.errors import InvalidArgument

A: dict[str, Any] = {
    "benchmark": "serve",
    "seed": 0,
    "num_prompts": 10,
    "request_rate": "inf",
    "max_concurrency": None,
    "completed": 10,
    "total_output_tokens": 100,
    "output_throughput": 100.0,
    "mean_ttft_ms": 50.0,
    "std_ttft_ms": 5.0,
    "p99_itl_ms": 0.0,
    "mbu": 0.25,
    "machine": {"processor": "X", "load_average": 1.0},
    "workload": {"dataset_name": "random", "random_input_len": 8, "seed": 0, "num_prompts": 10},
}


def changed(**fields) -> dict:
    return {**A, **fields}


def test_every_metric_has_a_ratio_and_a_direction():
    found = compare(A, changed(output_throughput=150.0, mean_ttft_ms=75.0, std_ttft_ms=1.0, p99_itl_ms=2.0))
    told = {ratio.metric: (ratio.ratio, ratio.is_better) for ratio in found.ratios}
    assert told == {
        "output_throughput": (1.5, True),
        "mean_ttft_ms": (1.5, False),
        "std_ttft_ms": (0.2, None),
        "p99_itl_ms": (None, False),
        "mbu": (1.0, None),
    }
    assert found.differences == ()


@pytest.mark.parametrize(
    ("fields", "difference"),
    [
        ({"seed": 1}, "seed: 0 and 1"),
        ({"num_prompts": 20}, "num_prompts: 10 and 20"),
        ({"request_rate": 4.0}, "request_rate: inf and 4.0"),
        ({"total_output_tokens": 90}, "total_output_tokens at inf/s: 100 and 90"),
        ({"machine": {"processor": "Y", "load_average": 9.0}}, "machine.processor: X and Y"),
        ({"workload": {**A["workload"], "random_input_len": 9}}, "workload.random_input_len: 8 and 9"),
        ({"benchmark": "throughput"}, "benchmark: serve and throughput"),
    ],
)
def test_what_keeps_two_runs_apart_is_said_once(fields, difference):
    found = compare(A, changed(**fields))
    assert found.differences == (difference,)
    assert found.ratios


def test_servers_of_two_kinds_may_name_a_model_as_they_like():
    ours, theirs = changed(backend="jpaged", model_id="demo"), changed(backend="openai", model_id="/models/demo")
    assert compare(ours, theirs).differences == ()
    assert compare(ours, {**theirs, "backend": "jpaged"}).differences == ("model_id: demo and /models/demo",)


def test_what_one_file_does_not_tell_is_no_difference():
    other = {key: value for key, value in A.items() if key not in ("machine", "workload", "seed", "benchmark")}
    assert compare(A, other).differences == ()
    assert len(compare(A, other).ratios) == 5


def test_sweeps_are_compared_rate_by_rate():
    def sweep(**rates) -> dict:
        return {
            "runs": [{"request_rate": float(rate[1:]), "output_throughput": value} for rate, value in rates.items()]
        }

    found = compare(sweep(r1=10.0, r2=20.0, r4=40.0), sweep(r2=30.0, r4=40.0, r8=9.0))
    assert [(r.rate, r.ratio) for r in found.ratios] == [("2.0", 1.5), ("4.0", 1.0)]
    assert found.differences == ("request rates that one of them alone has: 1.0, 8.0",)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read"), ("[]", "no JSON object"), ('{"a": 1}', "it has no metric"), (None, "cannot be read")],
)
def test_a_file_that_is_no_result_is_named(tmp_path: Path, text, message):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        read_result(path)


def test_a_result_is_read(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(A))
    assert read_result(path) == A
