"""The numbers of a run, against the same numbers computed one request at a time, and the keys that vLLM has."""

import math

import numpy as np
import pytest

from jpaged.bench.metrics import (
    Trace,
    details,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    percentile_key,
    summarize,
)
from jpaged.errors import InvalidArgument
from tests.bench.words import trace_of

# start, token times: two requests side by side, one alone of a single token
TRACES = [
    trace_of(10.0, [10.5, 10.6, 10.9], prompt_len=7),
    trace_of(10.1, [10.9, 11.9], prompt_len=3, queue_s=0.25),
    trace_of(13.0, [13.25], prompt_len=2),
]
FAILED = Trace(9, error="the server is away")


def result(*traces, **options):
    return summarize(traces or (*TRACES, FAILED), 4.0, **options)


def test_throughputs_count_what_succeeded():
    found = result()
    assert (found["completed"], found["failed"]) == (3, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (12, 6)
    assert found["request_throughput"] == 3 / 4
    assert found["output_throughput"] == 6 / 4
    assert found["total_token_throughput"] == 18 / 4
    assert found["duration"] == 4.0


def test_latencies_are_those_of_a_plain_computation():
    everything = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
    found = result(metrics=everything, percentiles=(50.0, 90.0, 99.9))
    values: dict[str, list[float]] = {
        "ttft": [500, 800, 250],
        "tpot": [(900 - 500) / 2, (1800 - 800) / 1],
        "itl": [100, 300, 1000],
        "e2el": [900, 1800, 250],
        "client_queue_time": [0, 250, 0],
        "e2el_including_client_queue": [900, 2050, 250],
    }
    for name, numbers in values.items():
        ordered = sorted(numbers)
        mean = sum(numbers) / len(numbers)
        assert found[f"mean_{name}_ms"] == pytest.approx(mean)
        assert found[f"std_{name}_ms"] == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in numbers) / len(numbers)))
        for percentile in (50.0, 90.0, 99.9):  # linear between the two nearest
            place = percentile / 100 * (len(ordered) - 1)
            low = int(place)
            high = min(low + 1, len(ordered) - 1)
            expected = ordered[low] + (ordered[high] - ordered[low]) * (place - low)
            assert found[f"{percentile_key(percentile)}_{name}_ms"] == pytest.approx(expected)
        assert found[f"median_{name}_ms"] == pytest.approx(found[f"p50_{name}_ms"])


def test_random_traces_agree_with_numpy_request_by_request():
    rng = np.random.default_rng(0)
    traces = [
        trace_of(start, (start + 0.1 + np.cumsum(rng.exponential(0.05, rng.integers(1, 30)))).tolist())
        for start in rng.uniform(0, 3, 40).tolist()
    ]
    found = result(*traces, metrics=("ttft", "tpot", "itl", "e2el"), percentiles=(25.0, 99.0))
    arrivals = [np.array([t.first_s, *(t.first_s + np.cumsum(t.itls_s))]) for t in traces]
    gaps = 1e3 * np.concatenate([np.diff(times) for times in arrivals])
    per_token = [1e3 * (times[-1] - times[0]) / (times.size - 1) for times in arrivals if times.size > 1]
    assert found["p25_itl_ms"] == pytest.approx(np.percentile(gaps, 25))
    assert found["mean_tpot_ms"] == pytest.approx(np.mean(per_token))
    assert found["p99_tpot_ms"] == pytest.approx(np.percentile(per_token, 99))
    everything = np.concatenate(arrivals) - min(t.start_s for t in traces)
    assert found["max_output_tokens_per_s"] == max(np.sum(everything.astype(int) == s) for s in range(10))
    instants = [t.start_s for t in traces]
    assert found["max_concurrent_requests"] == max(sum(t.start_s <= now < t.end_s for t in traces) for now in instants)


def test_only_the_metrics_that_were_asked_for_are_told():
    assert {key for key in result() if key.startswith("mean_")} == {"mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms"}
    assert {key for key in result(metrics=("e2el",), percentiles=(99.9,)) if key.endswith("_ms")} == {
        "mean_e2el_ms",
        "median_e2el_ms",
        "std_e2el_ms",
        "p99.9_e2el_ms",
    }


@pytest.mark.parametrize(
    ("goodput", "num_good"),
    [
        ({"ttft": 500.0}, 2),
        ({"ttft": 499.0}, 1),
        ({"tpot": 201.0}, 2),
        ({"tpot": 199.0}, 1),
        ({"e2el": 1800.0}, 3),
        ({"ttft": 500.0, "e2el": 250.0}, 1),
    ],
)
def test_goodput_counts_requests_whose_every_time_is_within_its_objective(goodput, num_good):
    traces = [trace_of(0.0, [0.5, 0.6, 0.9]), trace_of(0.0, [0.75, 1.75]), trace_of(0.0, [0.25])]
    assert summarize(traces, 4.0, goodput=goodput)["request_goodput"] * 4 == num_good
    assert summarize(traces, 4.0)["request_goodput"] is None


def test_a_run_in_which_nothing_succeeded_has_numbers_too():
    found = result(FAILED)
    assert (found["completed"], found["failed"], found["mean_ttft_ms"], found["max_concurrent_requests"]) == (
        0,
        1,
        0.0,
        0,
    )


def test_the_keys_are_those_of_vllms_benchmark():
    assert result().keys() >= {
        "duration",
        "completed",
        "failed",
        "total_input_tokens",
        "total_output_tokens",
        "request_throughput",
        "request_goodput",
        "output_throughput",
        "total_token_throughput",
        "max_output_tokens_per_s",
        "max_concurrent_requests",
        *(f"{word}_{name}_ms" for word in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl")),
    }
    assert details(TRACES).keys() == {
        "input_lens",
        "output_lens",
        "ttfts",
        "itls",
        "latencies",
        "start_times",
        "queue_times",
        "generated_texts",
        "errors",
    }
    assert details([*TRACES, FAILED])["errors"] == ["", "", "", "the server is away"]


def test_what_was_asked_for_is_read():
    assert parse_goodput(["ttft:200", "e2el:3e3"]) == {"ttft": 200.0, "e2el": 3000.0}
    assert parse_metrics("ttft,e2el") == ("ttft", "e2el")
    assert parse_percentiles("25,99.9") == (25.0, 99.9)


@pytest.mark.parametrize(
    ("parse", "word", "message"),
    [
        (parse_goodput, ["itl:3"], "--goodput: 'itl:3' is not NAME:MILLISECONDS with one of ttft, tpot, e2el"),
        (parse_goodput, ["ttft"], "--goodput: 'ttft' is not"),
        (parse_goodput, ["ttft:-1"], "--goodput: 'ttft:-1' is not"),
        (parse_goodput, ["ttft:nan"], "--goodput: 'ttft:nan' is not"),
        (parse_metrics, "ttft,speed", "--percentile-metrics: 'speed' is not one of ttft"),
        (parse_percentiles, "50,101", "--metric-percentiles: '101' is not a number from 0 to 100"),
        (parse_percentiles, "many", "--metric-percentiles: 'many' is not"),
    ],
)
def test_words_that_mean_nothing_are_named(parse, word, message):
    with pytest.raises(InvalidArgument, match=message):
        parse(word)
