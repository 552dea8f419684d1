"""Experts whole on each device, by `enable_expert_parallel`, or in parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jpaged.types import SamplingParams
from tests.e2e.rig import engine_of, generate, open_llm, random_prompts

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize(("is_parallel", "local_shape"), [(False, (4, 32, 12)), (True, (2, 32, 24))])
def test_each_device_has_some_experts_whole_or_a_part_of_each(
    is_parallel: bool, local_shape: tuple[int, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL), encoding="utf-8")
    options = {"load_format": "dummy", "tensor_parallel_size": 2, "max_model_len": 64, "num_blocks": 16}
    with open_llm(tmp_path, **options, enable_expert_parallel=is_parallel) as llm:
        params = engine_of(llm)._executor._runner._params  # type: ignore[attr-defined]
        kernel = params["layers"][0]["mlp"]["experts"]["gate"]["kernel"]
        assert kernel.sharding.shard_shape(kernel.shape) == local_shape
        (output,) = generate(llm, random_prompts([20]), SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
        assert len(output.token_ids) == 5
