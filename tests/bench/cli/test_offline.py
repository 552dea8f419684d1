"""`jpaged bench throughput` and `latency`: over the fake model, with the limit of a device that is not here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from jpaged import local_model
from jpaged.bench import limits
from jpaged.bench.cli import probe
from jpaged.bench.cli.offline import get_vocabulary
from jpaged.bench.datasets import FolderVocabulary
from jpaged.bench.limits import ServedModel
from jpaged.cli.main import main
from jpaged.demo import FOLDER
from jpaged.errors import InvalidArgument
from jpaged.kernels.paged_attention import measure
from jpaged.kernels.paged_attention.measure import DeviceFacts, DeviceLimits, Survey
from jpaged.plan.step_times import stored_shape
from tests.checkpoints.gguf.files import checkpoint, of_kind, write_gguf
from tests.checkpoints.gguf.test_tokenizer import demo_metadata
from tests.cli.fake_jpaged import build


@pytest.fixture(autouse=True)
def _fake_model(monkeypatch):
    monkeypatch.setattr(local_model, "build", build)


def test_throughput_counts_what_was_generated_against_the_limit(tmp_path: Path, capsys, monkeypatch):
    # Random ids of the demo's vocabulary are more than the fake has.
    path = tmp_path / "custom.jsonl"
    path.write_text('{"prompt_token_ids": [65, 66, 67], "output_tokens": 4}\n' * 5)
    data = ["--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "5", "--n", "2"]
    output = ["--hardware", "h200", "--output-json", str(tmp_path / "a.json"), "--max-num-seqs", "4"]
    assert main(["bench", "throughput", *data, *output]) == 0
    result = json.loads((tmp_path / "a.json").read_text())
    assert (result["num_requests"], result["total_num_tokens"]) == (5, 5 * 3 + 5 * 2 * 4)
    elapsed_s = result["elapsed_time"]
    assert result["num_steps"] >= 10  # ten sequences of four tokens, four at a time
    assert result["requests_per_second"] == pytest.approx(5 / elapsed_s)
    assert result["tokens_per_second"] == pytest.approx(55 / elapsed_s)
    assert result["output_tokens_per_second"] == pytest.approx(40 / elapsed_s)
    work = ServedModel(stored_shape(FOLDER, result["dtype"])).work([(3, 4)] * 10, 10, 4)
    assert result["mbu"] == pytest.approx(work.num_bytes / 4800e9 / elapsed_s)
    assert result["mfu"] == pytest.approx(work.flops / 989e12 / elapsed_s)
    assert (result["benchmark"], result["model_id"], result["workload"]["num_prompts"]) == ("throughput", "demo", 5)
    assert "memory bandwidth utilization" in capsys.readouterr().out


def test_latency_times_batches_and_leaves_warm_ups_out(tmp_path: Path, capsys):
    vocabulary = tmp_path / "model"
    vocabulary.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (vocabulary / name).write_bytes((FOLDER / name).read_bytes())
    config = json.loads((vocabulary / "config.json").read_text())
    (vocabulary / "config.json").write_text(json.dumps({**config, "vocab_size": 200}))
    sizes = [
        "--batch-size",
        "3",
        "--input-len",
        "4",
        "--output-len",
        "6",
        "--num-iters",
        "5",
        "--num-iters-warmup",
        "1",
    ]
    output = ["--hardware", "none", "--output-json", str(tmp_path / "a.json")]
    assert main(["bench", "latency", "--model", str(vocabulary), *sizes, *output]) == 0
    result = json.loads((tmp_path / "a.json").read_text())
    assert len(result["latencies"]) == 5
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 5)
    assert result["percentiles"].keys() == {"10", "25", "50", "75", "90", "99"}
    assert result["percentiles"]["50"] == sorted(result["latencies"])[2]
    assert result["output_tokens_per_second"] == pytest.approx(18 / result["avg_latency"])
    assert result["options"]["enable-prefix-caching"] == "False"
    assert result["limits"] == {"source": "disabled by --hardware none"}
    assert "mbu" not in result
    assert "batch latency in ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["throughput", "--n", "0"], "--n: 0 is out of range: must be from 1 to 256"),
        (["throughput", "--num-prompts", "0"], "--num-prompts: 0 is out of range"),
        (["throughput", "one", "--model", "two"], "model: one conflicts with --model two: give only one of them"),
        (
            ["throughput", "--output-json", "/nowhere/a"],
            "--output-json: /nowhere/a is a folder, or its folder does not exist",
        ),
        (["latency", "--batch-size", "0"], "--batch-size: 0 is out of range"),
        (["latency", "--num-iters", "0"], "--num-iters: 0 is out of range"),
        (["latency", "--seed", "-1"], "--seed: -1 is out of range"),
        (["latency", "--max-num-seqs", "0"], "--max-num-seqs: 0 is below the limit of 1"),
        (["latency", "--hardware", "none", "--temperature", "-1"], "temperature: -1"),
    ],
)
def test_what_is_wrong_is_named(words, message, capsys):
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("cpu", (3e9, 7e9, "measured: the best of numpy and XLA on cpu, bfloat16")),
        ("NVIDIA H200", (4800e9, 989e12, "data sheet of h200")),
        ("NVIDIA T4", (1e9, 7e9, "measured: XLA on NVIDIA T4, bfloat16")),
    ],
)
def test_the_probe_measures_cpus_and_looks_accelerators_up(kind, told, monkeypatch, capsys):
    facts = DeviceFacts(kind, "0", DeviceLimits(1e9, 7e9))
    monkeypatch.setattr(measure, "survey", lambda *arguments: Survey(facts, (), ()))
    monkeypatch.setattr(limits, "probe", lambda: limits.HardwareLimits(3e9, 5e9, "numpy"))
    assert main(["bench", "probe", "--dtype", "bfloat16", "--json"]) == 0
    assert tuple(json.loads(capsys.readouterr().out).values()) == told
    assert main(["bench", "probe", "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out.startswith(f"reads {told[0] / 1e9:.1f} GB/s")


def test_a_probe_that_fails_says_its_last_words(monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(Exception, match="the probe of this machine exited with code 1: no output"):
        probe.probed("float32")


def test_a_gguf_file_brings_the_tokens_of_its_prompts(tmp_path: Path):
    model = checkpoint("llama_mha", num_hidden_layers=1, vocab_size=3072)
    write_gguf(model, tmp_path / "tiny.gguf", of_kind("F32"), more=demo_metadata())
    found, wanted = get_vocabulary(str(tmp_path / "tiny.gguf")), FolderVocabulary(FOLDER)
    assert (found.size, found.special_ids) == (wanted.size, wanted.special_ids)
    text = "Once upon a time there was a dragon."
    assert found.decode(found.encode(text)) == text
    assert list(found.encode(text)) == list(wanted.encode(text))
    write_gguf(model, tmp_path / "mute.gguf", of_kind("F32"))
    with pytest.raises(InvalidArgument, match=r"mute.gguf has no tokenizer"):
        get_vocabulary(str(tmp_path / "mute.gguf"))
