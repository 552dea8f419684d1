"""Experts whole on each device, by `enable_expert_parallel`, or in parts: where they lie, and the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jpaged.llm import LLM
from jpaged.types import SamplingParams
from tests.e2e.rig import engine_of, generate, open_llm, random_prompts
from tests.models.tiny import tiny_case, write_checkpoint

pytestmark = pytest.mark.usefixtures("quick_programs")

BASE: dict[str, Any] = {"max_model_len": 64, "num_blocks": 64, "block_size": 8, "linear_backend": "xla"}
HOW = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LENGTHS = (3, 19, 30)
"""Together, and in chunks of 8."""


def answers(llm: LLM) -> list[Sequence[int]]:
    return [output.token_ids for output in generate(llm, random_prompts(list(LENGTHS)), HOW)]


def alone(folder: Path) -> list[Sequence[int]]:
    """Each prompt by itself, on one device and its own kernel."""
    with open_llm(folder, **{**BASE, "linear_backend": "auto"}) as llm:
        return [generate(llm, [prompt], HOW)[0].token_ids for prompt in random_prompts(list(LENGTHS))]


def check(name: str, splits: Sequence[tuple[int, bool]], folder: Path) -> None:
    """The same tokens alone on one device, and together on so many, with whole experts or with parts."""
    write_checkpoint(tiny_case(name), folder)
    want = alone(folder)
    for num_devices, is_parallel in splits:
        options = {**BASE, "tensor_parallel_size": num_devices, "enable_expert_parallel": is_parallel}
        with open_llm(folder, **options) as llm:
            kernel = kernel_of(llm)
            num_experts, width, inner = kernel.shape
            shape = (num_experts // num_devices, width, inner)
            if not is_parallel:
                shape = (num_experts, width, inner // num_devices)
            assert kernel.sharding.shard_shape(kernel.shape) == shape
            assert answers(llm) == want, (num_devices, is_parallel)


def kernel_of(llm: LLM) -> Any:
    """The gates of the last layer's experts."""
    params = engine_of(llm)._executor._runner._params  # type: ignore[attr-defined]
    return params["layers"][-1]["mlp"]["experts"]["gate"]["kernel"]


@pytest.mark.long
def test_devices_with_whole_experts_or_parts_change_no_token(tmp_path: Path) -> None:
    check("mixtral", [(4, True), (2, False)], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_any_number_of_devices_changes_no_token(name: str, tmp_path: Path) -> None:
    check(name, [(2, True), (4, False)], tmp_path)
