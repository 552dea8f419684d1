"""Balanced experts: tokens and their log-probabilities do not depend on where experts are, nor on when they move."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged import LLM
from jpaged.errors import InvalidArgument
from jpaged.server_load import EngineLoad
from jpaged.types import CompletionOutput, SamplingParams
from tests.e2e.rig import chosen_logprobs, generate, open_llm, random_prompts
from tests.models.tiny import tiny_case, write_checkpoint

SIZES: dict[str, Any] = {"num_blocks": 120, "block_size": 8, "max_model_len": 120, "max_num_batched_tokens": 16}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=24, ignore_eos=True, logprobs=0)


def on(num_devices: int, eplb: dict[str, Any] | None) -> dict[str, Any]:
    parallel = {"tensor_parallel_size": num_devices, "enable_expert_parallel": True}
    balanced = {} if eplb is None else {"enable_eplb": True, "eplb_config": json.dumps(eplb)}
    return {**SIZES, **parallel, **balanced, "max_num_seqs": 4 * num_devices}


def answers(folder: Path, options: dict[str, Any]) -> tuple[Sequence[CompletionOutput], EngineLoad]:
    """Completions, together in one batch, and the counters of the engine."""
    prompts = random_prompts([3, 7, 12, 5, 30, 4])
    params = [GREEDY, dataclasses.replace(SAMPLED, seed=1), GREEDY, SAMPLED, GREEDY, SAMPLED]
    with open_llm(folder, **options) as llm:
        found = generate(llm, prompts, params)
        return found, llm.load()


OFTEN = {"step_interval": 5, "window_size": 3}
RARELY = {"step_interval": 1_000_000, "window_size": 100}


@pytest.mark.long
@pytest.mark.usefixtures("quick_programs")
def test_physical_experts_have_to_be_shared_evenly(tmp_path: Path) -> None:
    write_checkpoint(tiny_case("deepseek_v3"), tmp_path)
    with pytest.raises(InvalidArgument, match=r"eplb_config\.num_redundant_experts: 3: .* among 4 devices; 0 or a "):
        LLM(str(tmp_path), **on(4, {"num_redundant_experts": 3}))
    with pytest.raises(InvalidArgument, match="enable_eplb: is on, but the model is on one device"):
        LLM(str(tmp_path), **on(1, {"num_redundant_experts": 0}))


@pytest.mark.long
@pytest.mark.usefixtures("quick_programs")
@pytest.mark.parametrize(
    ("name", "num_devices", "options"),
    [
        ("deepseek_v3", 4, {"enable_dp_attention": True}),
        ("deepseek_v2", 2, {"enable_dp_attention": True, "quantization": "int8"}),
        ("deepseek_v3", 2, {"enable_dp_attention": True, "num_scheduler_steps": 4, "dtype": "bfloat16"}),
        ("qwen3_moe", 2, {}),
        ("gpt_oss", 2, {"dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_moves_in_the_middle_of_generations_change_no_bit(
    name: str, num_devices: int, options: dict[str, Any], tmp_path: Path
) -> None:
    write_checkpoint(tiny_case(name), tmp_path)
    redundant = {"num_redundant_experts": num_devices}
    often, load = answers(tmp_path, {**on(num_devices, {**OFTEN, **redundant}), **options})
    assert load.num_expert_load_reads >= load.num_expert_rearrangements >= 2
    assert load.num_experts_moved > load.num_expert_rearrangements
    assert 0 < load.expert_balancedness <= 1 <= load.expert_peak_ratio
    rarely, load = answers(tmp_path, {**on(num_devices, {**RARELY, **redundant}), **options})
    assert (load.num_expert_rearrangements, load.num_experts_moved) == (0, 0)
    plain, load = answers(tmp_path, {**on(num_devices, None), **options})
    assert load.num_expert_load_reads == 0
    for a, b, c in zip(often, rarely, plain, strict=True):
        assert a.token_ids == b.token_ids
        assert chosen_logprobs(a) == chosen_logprobs(b), "sums have the same order wherever experts are"
        if "dtype" in options:  # which partial sums are rounded to 16 bits differs
            continue
        assert a.token_ids == c.token_ids
        np.testing.assert_allclose(
            chosen_logprobs(a), chosen_logprobs(c), rtol=0, atol=2e-3 if "quantization" in options else 1e-4
        )
