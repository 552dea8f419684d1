"""Prefixes on disk under real models: what comes back gives the tokens that computing it gives."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jpaged.engine.data_parallel import DataParallelEngine
from jpaged.llm import LLM
from jpaged.types import SamplingParams
from tests.e2e.rig import generate, open_llm, random_prompts, write_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
SIZES = {"max_model_len": 96, "num_blocks": 40, "block_size": 8, "swap_space": 0.01}


def engines_of(llm: LLM) -> list[Any]:
    """Its engine, or each of its replicas."""
    engine = llm._serving.engine
    return [*engine._engines] if isinstance(engine, DataParallelEngine) else [engine]


def be_patient(llm: LLM) -> None:
    """Has it wait for the disk however busy the machine is."""
    for engine in engines_of(llm):
        prefill = engine._loop.memory.connectors[0]._reader.prefill
        prefill._rates = dataclasses.replace(prefill._rates, forward_s=((1, 1000.0),))


OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "int8": {"kv_cache_dtype": "int8"},
    "replicas": {"data_parallel_size": 2},
    "parts": {"tensor_parallel_size": 2},
    "contexts in parts": {"context_parallel_size": 2, "tensor_parallel_size": 2},
}


@pytest.mark.parametrize("options", ["alone", *(pytest.param(name, marks=pytest.mark.long) for name in [*OPTIONS][1:])])
def test_a_prefix_outlives_its_engine_on_disk(tmp_path: Path, options: str) -> None:
    """Written when it ends, found when it begins again: the same tokens, and none computed that disk has."""
    folder = write_model("llama_mha", tmp_path / "model")
    disk: dict[str, Any] = {"kv_disk_space": 0.01, "kv_disk_dir": str(tmp_path / "kv"), **SIZES, **OPTIONS[options]}
    prompts = random_prompts([50, 70])
    with open_llm(folder, **disk) as llm:
        first = generate(llm, prompts, GREEDY)
    num_bytes = sum(file.stat().st_size for file in tmp_path.rglob("*.blocks"))
    assert 0 < num_bytes <= 0.01 * 2**30
    with open_llm(folder, **disk) as llm:
        assert llm.load().num_disk_blocks == 7 + 9
        be_patient(llm)
        second = generate(llm, prompts, GREEDY)
        assert llm.load().num_disk_hit_tokens == 48 + 64
    assert second == first


@pytest.mark.long  # tests/device/test_transfers.py has the identity, tests/blockstore what is found of another
def test_another_type_of_numbers_finds_nothing(tmp_path: Path) -> None:
    folder = write_model("llama_mha", tmp_path / "model")
    disk: dict[str, Any] = {"kv_disk_space": 0.01, "kv_disk_dir": str(tmp_path / "kv"), **SIZES}
    prompts = random_prompts([50])
    with open_llm(folder, **disk) as llm:
        generate(llm, prompts, GREEDY)
    with open_llm(folder, kv_cache_dtype="int8", **disk) as llm:
        be_patient(llm)
        generate(llm, prompts, GREEDY)
        assert (llm.load().num_disk_hit_tokens, llm.load().num_disk_failures) == (0, 0)
    assert len({file.parent for file in tmp_path.rglob("*.blocks")}) == 2
