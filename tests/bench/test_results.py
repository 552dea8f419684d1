"""The names of result files, and what a result says of its workload."""

from pathlib import Path

import pytest

from jpaged.bench.datasets import DatasetOptions
from jpaged.bench.load_generator import ArrivalProcess, Ramp
from jpaged.bench.results import parse_metadata, rate_word, result_path, speed_word, workload
from jpaged.errors import InvalidArgument


def test_a_file_is_named_after_its_run():
    named = result_path(Path("d"), None, label="x", speed="2.0qps", max_concurrency=8, model="org/a model")
    assert str(named).startswith("d/x-2.0qps-concurrency8-a_model-")
    assert named.suffix == ".json"
    assert result_path(None, "a.json", label="x", speed="", max_concurrency=None, model="") == Path("a.json")


def test_a_speed_has_a_word():
    assert speed_word(ArrivalProcess()) == "infqps"
    assert speed_word(ArrivalProcess(2.5)) == "2.5qps"
    assert speed_word(ArrivalProcess(ramp=Ramp("linear", 1, 8))) == "ramp-up-linear-1qps-8qps"
    assert (rate_word(float("inf")), rate_word(2.5)) == ("inf", 2.5)


def test_a_workload_tells_the_fields_of_its_own_data_set():
    told = workload(DatasetOptions(dataset_name="custom", dataset_path=Path("a.jsonl")))
    assert told["dataset_path"] == "a.jsonl"
    assert "custom_output_len" in told
    assert not any(name.startswith(("random_", "sharegpt_", "prefix_repetition_")) for name in told)


def test_metadata_is_pairs():
    assert parse_metadata(["a=1", "b=c=d"]) == {"a": "1", "b": "c=d"}
    with pytest.raises(InvalidArgument, match="'=1' is not KEY=VALUE"):
        parse_metadata(["=1"])
