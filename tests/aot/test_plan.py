"""`jpaged plan` with libtpu, as on any laptop: models that fit, with defaults too, and one whose pool is too large."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.tpu_programs import ROOT, library


def plan(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jpaged", "plan", *words],
        cwd=ROOT,
        env={**os.environ, "TPU_LIBRARY_PATH": str(library())},
        capture_output=True,
        text=True,
        check=False,
    )


def plan_with_defaults(model: str, topology: str, sizes: tuple[int, int, int, int]) -> dict[str, Any]:
    """A plan without options, which must be one that fits and runs on the devices' own kernel."""
    done = plan(model, "--topology", topology, "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["plans"]
    assert (found["attention_backend"], found["passed_over_backends"]) == ("pallas-tpu", [])
    options = ("max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens")
    assert tuple(found[name] for name in options) == sizes
    assert sum(found["memory_of_one_device"]["programs"].values()) < 1 << 30
    return found


@pytest.mark.long
def test_with_its_defaults_llama_3_8b_fits_into_four_v5e() -> None:
    found = plan_with_defaults("meta-llama/Llama-3.1-8B", "v5e:2x2", (131072, 128, 256, 1024))
    assert (found["fits"], found["tensor_parallel_size"]) == (True, 4)
    assert 0 <= found["memory_of_one_device"]["free_bytes"] < 48 << 20
    assert found["num_blocks"] * found["block_size"] > 320_000
    assert found["compile_seconds"] > 0
    assert {program["name"] for program in found["compiled_programs"]} >= {"forward[1024]", "forward[256]"}
    assert found["bytes_of_a_summed_number"] == 2  # though the programs ask for sums in float32
    assert found["estimates"][0]["prefill_s"] == pytest.approx(0.0357, rel=0.01)


@pytest.mark.deep
def test_with_its_defaults_qwen_3_32b_fits_into_eight_v6e() -> None:
    plan_with_defaults("qwen3-32b", "v6e:2x4", (40960, 128, 512, 2048))


@pytest.mark.deep
def test_a_pool_that_is_too_large_for_70b_is_reported_with_what_to_change() -> None:
    done = plan("llama-3.1-70b", "--topology", "v6e:2x4", "--max-model-len", "8192", "--num-blocks", "10000")
    assert done.returncode == 1
    assert "llama-3.1-70b on v6e:2x4: does not fit, over by 35.7" in done.stdout
    assert "num_blocks: 10000 blocks do not fit: 0.97 of 31.25 GiB (" in done.stdout
    assert "), minus 16.43 GiB for weights" in done.stdout
    assert "lower num_blocks to 26" in done.stdout
    assert "compiler error: RESOURCE_EXHAUSTED: Ran out of memory" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def plan_with_draft(model: str, draft: str, *words: str) -> dict[str, Any]:
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    done = plan(model, *words, "--json", "--speculative-config", json.dumps(config))
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["plans"]
    assert (found["fits"], found["attention_backend"]) == (True, "pallas-tpu")
    return found


@pytest.mark.long
def test_a_draft_model_has_its_place_in_the_memory_and_its_programs_are_compiled() -> None:
    found = plan_with_draft("demo", "demo-draft", "--topology", "v6e:1x1", "--max-num-seqs", "8")
    assert {program["name"] for program in found["compiled_programs"]} >= {"speculate[8]", "draft[2048]"}
    # More than keys and values of the model's 4 layers with 4 heads of 32.
    assert found["memory_of_one_device"]["bytes_per_block"] > found["block_size"] * 2 * (2 * 4 * 4 * 32)


@pytest.mark.deep
def test_a_draft_model_is_split_as_its_model_is() -> None:
    sizes = "--max-model-len", "8192", "--max-num-seqs", "64"
    found = plan_with_draft("llama-3-8b", "llama-3.2-1b", "--topology", "v5e:2x2", *sizes)
    assert found["tensor_parallel_size"] == 4
    assert {program["name"] for program in found["compiled_programs"]} >= {"speculate[64]", "draft[1024]"}
    # A quarter of the keys and values of 32 layers with 8 heads of 128, and of the draft's 16 with 8 of 64.
    assert found["memory_of_one_device"]["bytes_per_block"] == found["block_size"] * 2 * (
        2 * 32 * 2 * 128 + 2 * 16 * 2 * 64
    )


@pytest.mark.long
def test_weights_that_do_not_fit_are_known_without_compiling() -> None:
    done = plan("llama-3.1-70b", "--topology", "v5e:2x4", "--max-model-len", "8192", "--json")
    assert done.returncode == 1
    (found,) = json.loads(done.stdout)["plans"]
    assert (found["fits"], found["compiled_programs"]) == (False, [])
    assert found["problem"].startswith("tensor_parallel_size: the weights alone are 16.43 GiB per device")
