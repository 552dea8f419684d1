"""`jpaged bench simulate`: what it prints, and what it refuses."""

import json

import pytest

from jpaged.cli.main import main

SMALL = ["bench", "simulate", "--trace", "alpaca", "--num-requests", "5"]


@pytest.mark.long
def test_json_has_every_measure_and_a_seed_decides_them(capsys):
    outputs = []
    for seed in ("1", "1", "2"):
        assert main([*SMALL, "--seed", seed, "--rate", "3", "--json"]) == 0
        outputs.append(json.loads(capsys.readouterr().out))
    assert outputs[0] == outputs[1] != outputs[2]
    assert outputs[0]["num_requests"] == 5
    assert outputs[0]["num_blocks"] == 981
    assert 0.02 < outputs[0]["normalized_latency_mean_s"] < outputs[0]["normalized_latency_p99_s"] < 0.1


def test_a_table_names_the_deployment(capsys):
    assert main([*SMALL, "--model", "llama-3-8b", "--hardware", "tpu-v6e", "--kv-policy", "reserve-max"]) == 0
    printed = capsys.readouterr().out
    assert "llama-3-8b on 1 x tpu-v6e" in printed
    assert "normalized latency p99 s" in printed


def test_a_file_is_served(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 20, "output_tokens": 4, "n": 3}\n')
    assert main(["bench", "simulate", "--trace", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["blocks_saved_by_sharing_percent"] > 0


def test_a_duration_is_a_number_of_requests(capsys):
    assert main(["bench", "simulate", "--trace", "alpaca", "--rate", "4", "--duration", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_requests"] == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "0"], "--rate: 0.0 is out of range: must be above 0"),
        (["--num-requests", "0"], "--num-requests: 0 is out of range: must be from 1"),
        (["--num-requests", "3", "--duration", "2"], "--duration: conflicts with --num-requests"),
        (["--seed", "-1"], "--seed: -1 is out of range: must be from 0"),
        (["--block-size", "0"], "--block-size: 0 is out of range"),
        (["--hardware", "tpu-v5e"], "num_devices: 1 x tpu-v5e leave 14.4 GB"),
        (["--num-host-blocks", "-1"], "--num-host-blocks: -1 is out of range: must be from 0"),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens: 0 is out of range"),
        (["--trace", "nowhere.jsonl", "--rate", "1"], "--rate: applies only to synthetic traces"),
        (["--trace", "nowhere.jsonl"], "trace: nowhere.jsonl cannot be read"),
    ],
)
def test_a_wrong_option_is_named(words, message, capsys):
    assert main(["bench", "simulate", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_request_wider_than_a_step_is_refused(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 20, "output_tokens": 4, "n": 9}\n')
    assert main(["bench", "simulate", "--trace", str(path), "--max-num-seqs", "8"]) == 2
    assert "--max-num-seqs: 8 is below the 9 sequences" in capsys.readouterr().err
