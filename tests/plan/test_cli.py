"""`jpaged plan` on the command line: what it refuses in one line, and how it compares."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from jpaged.cli.main import main
from jpaged.device.aot.deployment import compile_deployment
from jpaged.device.mesh import build_mesh
from jpaged.device.step_sizes import DeviceAttention
from jpaged.plan import compilation
from jpaged.plan.compilation import CompiledPlan, Question, answer
from jpaged.plan.known_models import KNOWN_MODELS

MIB = 1 << 20


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["demo"], 2, "the following arguments are required: --topology"),
        (["demo", "--topology", "v6e:3x3"], 2, "--topology: 'v6e:3x3' is not known; known are a100, "),
        (["no-such-model", "--topology", "v6e:1x1"], 1, "'no-such-model' is not a config.json, a folder or a built-in"),
        (["demo", "--topology", "v6e:1x1", "--price", "cheap"], 2, "--price: 'cheap' is not a price in USD"),
        (["demo", "--topology", "v6e:1x1", "--price", "v6e=-1"], 2, "--price: -1 is below the limit of 0"),
        (["demo", "--topology", "v6e:1x1", "--input-len", "0"], 2, "--input-len: 0 is below the limit of 1"),
        (
            ["llama-3.1-8b", "--topology", "v6e:1x1", "--input-len", "8", "8192", "--max-model-len", "8192"],
            2,
            "--input-len: 8192 prompt tokens and 1 output tokens exceed max_model_len (8192)",
        ),
        (
            ["llama-2-7b", "--topology", "v6e:1x1", "--output-len", "4096"],
            2,
            "--output-len: 1 prompt tokens and 4096 output tokens exceed max_model_len (4096)",
        ),
        (
            ["demo", "--topology", "v6e:1x1", "--request-rate", "0"],
            2,
            "--request-rate: 0 is not a finite number above 0",
        ),
        (
            ["demo", "--topology", "v6e:1x1", "--input-len", "1", "2", "--output-len", "1", "2", "3"],
            2,
            "--output-len: 3 values for 2 of --input-len",
        ),
        (["demo", "--topology", "v6e:1x1,v5e:1x1", "--save", "x"], 2, "--save: supports one topology; 2 are"),
        (["demo", "--topology", "h100:8", "--save", "x"], 2, "--save: saved programs are not supported for GPUs"),
        (
            ["deepseek-v2-lite", "--topology", "v6e:2x2", "--save", "x", "--enable-dp-attention"],
            2,
            "--save: does not support --enable-dp-attention",
        ),
        (["demo", "--topology", "v6e:1x1", "--block-size", "0"], 2, "--block-size: 0 is below the limit of 1"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == code
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_without_libtpu_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    assert main(["plan", "demo", "--topology", "v6e:1x1"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("jpaged plan: libtpu, which compiles for TPUs, was not found at ")
    assert "`pip install libtpu` or `make aot`" in said
    assert said.count("\n") == 1


@pytest.mark.long
def test_without_cuda_it_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "demo", "--topology", "h200"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("jpaged plan: h200: this Python cannot compile for CUDA: ")
    assert "pip install 'jax[cuda13]'" in said
    assert said.count("\n") == 1


@pytest.mark.long
def test_a_child_that_dies_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compilation, "_GPU_ENVIRONMENT", {"JAX_PLATFORMS": "no such platform"})
    assert main(["plan", "demo", "--topology", "h200"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("jpaged plan: h200: ")
    assert said.count("\n") == 1


@pytest.fixture
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model is compiled for CPUs in this process, that stand for the devices of any target."""
    small: Callable[..., Any] = compile_deployment

    def cpus(topology: object) -> list[jax.Device]:
        return jax.devices()

    def with_little_memory(model: Any, options: Any, mesh: Any, hbm_bytes: int, **rest: Any) -> Any:
        num_bytes = 512 * MIB if hbm_bytes > 16 << 30 else 8 * MIB
        return small(model, options, build_mesh(jax.devices()[:1]), num_bytes, **rest)

    def in_this_process(question: Question, say: Callable[[str], None]) -> CompiledPlan:
        return answer(question, lambda what, done, total: say(what))

    monkeypatch.setattr(compilation, "compile_only_devices", cpus)
    monkeypatch.setattr(compilation, "compile_deployment", with_little_memory)
    monkeypatch.setattr(compilation, "compile_plan", in_this_process)


SMALL = ["--max-num-seqs", "8", "--max-num-batched-tokens", "8", "--max-model-len", "128", "--dtype", "float32"]
DEMO = ["plan", "demo", *SMALL, "--input-len", "64", "--output-len", "32"]


@pytest.mark.long
@pytest.mark.usefixtures("on_cpus")
@pytest.mark.parametrize(
    ("words", "lengths"),
    [([], (96, 32)), (["--input-len", "120"], (120, 8)), (["--output-len", "100"], (28, 100))],
)
def test_lengths_that_are_left_out_fit_into_a_sequence(
    words: list[str], lengths: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "demo", *SMALL, *words, "--topology", "v6e:1x1", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["plans"][0]["estimates"]
    assert (found["input_len"], found["output_len"]) == lengths


@pytest.mark.usefixtures("on_cpus")
@pytest.mark.long
def test_topologies_are_compared_and_the_cheapest_that_fits_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--topology", "v5e:1x1,v6e:1x1", "--topology", "v5p:1x1x1", "--price", "v5e=0.1,v6e=2,v5p=3"]
    assert main([*DEMO, *words, "--request-rate", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    v5e, v6e, v5p = said["plans"]
    assert [plan["fits"] for plan in said["plans"]] == [False, True, True]
    assert v5e["problem"].startswith("tensor_parallel_size: the weights alone are 0.01 GiB per device")
    assert said["cheapest"] == "v6e:1x1"
    memory = v6e["memory_of_one_device"]
    parts = memory["weight_bytes"] + memory["pool_bytes"] + sum(memory["programs"].values()) + memory["free_bytes"]
    assert parts == memory["usable_bytes"] == int(0.9 * 512 * MIB)
    assert v6e["estimates"][0]["num_fitting"] == v6e["num_blocks"] // 6
    assert v6e["estimates"][0]["num_running"] == 8
    assert v6e["service"] == {"num_slices": 1, "num_chips": 1, "usd_per_hour": 2.0}
    assert v5p["usd_per_million_output_tokens"] > 0
    assert len(v6e["compiled_programs"]) < v6e["num_programs"]
    start = v6e["estimated_start"]
    assert start["num_first"] + start["num_later"] == v6e["num_programs"]
    assert 0 < start["num_first"] < v6e["num_programs"]
    assert v5e["estimated_start"] is None


@pytest.mark.usefixtures("on_cpus")
@pytest.mark.long
def test_the_text_says_what_fits_and_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEMO, "--topology", "v6e:1x1,v5e:1x1", "--price", "2.5"]) == 0
    said = capsys.readouterr().out
    assert "demo on v6e:1x1: fits, " in said
    assert "demo on v5e:1x1: does not fit, over by " in said
    assert "the weights alone are" in said
    assert said.count("estimated start without a compile cache: ready in about ") == 1
    assert "of weights at 2 GB/s" in said
    assert "products at 70% of the bfloat16 peak, weights at 90% of the HBM's bandwidth" in said
    assert "decode attention, cycles: " in said
    assert "  decode, ms: products " in said
    assert "cheapest: v6e:1x1, " in said


@pytest.mark.usefixtures("on_cpus")
@pytest.mark.long
def test_a_kernel_that_is_passed_over_is_said_first_with_what_would_bring_it_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "attention xla, not pallas-tpu: it is Tuesday; --block-size 128 would enable it"
    monkeypatch.setattr(DeviceAttention, "passed_over", lambda self: [said])
    assert main([*DEMO, "--topology", "v6e:1x1"]) == 0
    assert main([*DEMO, "--topology", "v5e:1x1"]) == 1
    for plan in capsys.readouterr().out.strip().split("\n\n"):
        first = plan.splitlines()
        assert first[2:4] == [f"  {said}", "  steps of up to 8 rows and 8 tokens, blocks of 16"]


@pytest.mark.usefixtures("on_cpus")
@pytest.mark.long
def test_adapters_are_weights_that_every_step_reads(capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*words: str) -> dict[str, Any]:
        assert main([*DEMO, "--topology", "v6e:1x1", "--json", *words]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)["plans"][0]
        return found

    without, some = planned(), planned("--enable-lora", "--max-loras", "4", "--max-lora-rank", "8")
    one, other = (found["memory_of_one_device"] for found in (without, some))
    assert one["adapter_bytes"] == 0 < other["adapter_bytes"]
    assert other["weight_bytes"] - one["weight_bytes"] == other["adapter_bytes"]
    assert some["num_blocks"] < without["num_blocks"]
    assert some["estimates"][0]["prefill_s"] >= without["estimates"][0]["prefill_s"]
    assert any(note.startswith("4 adapter slots of rank 8 take ") for note in some["notes"])
    more = planned("--enable-lora", "--max-loras", "8", "--max-lora-rank", "16")
    assert more["memory_of_one_device"]["adapter_bytes"] == 4 * other["adapter_bytes"]
    for option in ("--enable-dora", "--enable-lm-head-lora", "--enable-embedding-lora"):
        extra = planned("--enable-lora", "--max-loras", "4", "--max-lora-rank", "8", option)["memory_of_one_device"]
        assert extra["adapter_bytes"] > other["adapter_bytes"]
        assert extra["weight_bytes"] - one["weight_bytes"] == extra["adapter_bytes"]


@pytest.mark.long
@pytest.mark.usefixtures("on_cpus")
def test_roles_are_compared_where_somebody_asks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--topology", "v6e:1x1,v5e:1x1", "--roles", "--max-ttft-ms", "100"]
    assert main([*DEMO, *words]) == 0
    said = capsys.readouterr().out
    assert (
        said.count("roles for 64 + 32 tokens on 2 copies: time to first token up to 100 ms (mean)") == 1
    )  # v5e: no room
    assert "  choose: --role both; apart carries 0." in said
    assert main([*DEMO, *words, "--json"]) == 0
    fits, does_not = json.loads(capsys.readouterr().out)["plans"]
    assert (fits["roles"]["choose"], fits["roles"]["num_copies"]) == ("both", 2)
    assert fits["roles"]["mixed"]["ttft_s"] <= 0.1
    assert does_not["roles"] is None


def test_goals_of_roles_without_them_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEMO, "--topology", "v6e:1x1", "--max-itl-ms", "20"]) == 2
    assert "--max-itl-ms: requires --roles" in capsys.readouterr().err
    assert main([*DEMO, "--topology", "v6e:1x1", "--roles", "--max-itl-ms", "nan"]) == 2
    assert "--max-itl-ms: nan is not a finite number above 0" in capsys.readouterr().err


@pytest.mark.usefixtures("on_cpus")
def test_it_fails_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEMO, "--topology", "v5e:1x1"]) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.usefixtures("on_cpus")
@pytest.mark.long
def test_a_config_alone_is_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {**KNOWN_MODELS["opt-125m"].fields, "num_hidden_layers": 1, "vocab_size": 100}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    assert main(["plan", str(path), *SMALL, "--topology", "v6e:1x1", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["plans"]
    assert (found["model"], found["tensor_parallel_size"]) == (str(path), 1)


@pytest.mark.usefixtures("on_cpus")
def test_more_devices_than_there_are_is_said_in_the_words_of_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*DEMO, "--topology", "v6e:2x2", "--tensor-parallel-size", "8"]) == 2
    assert "--tensor-parallel-size: requires 8 devices; v6e:2x2 has 4" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.usefixtures("on_cpus")
def test_a_copy_takes_what_its_heads_allow_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEMO, "--topology", "v6e:4x4", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["plans"]
    assert found["tensor_parallel_size"] * found["num_copies"] <= 16
    assert f"tensor_parallel_size is {found['tensor_parallel_size']}" in found["notes"][0]
