"""The devices that share the layers change no token: of any kind of request, however its memory is moved about."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument
from jpaged.types import SamplingParams
from tests.e2e.devices.test_context_parallel import check_devices
from tests.e2e.rig import assert_same, generate, open_llm, random_prompts, write_model
from tests.e2e.test_sharing import CHECKS
from tests.e2e.test_tensor_parallel import two_layers
from tests.models.tiny import tiny_case

pytestmark = pytest.mark.usefixtures("quick_programs")

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3)


@pytest.mark.long
@pytest.mark.parametrize(("stages", "contexts", "size"), [(2, 1, 1), (4, 1, 1), (2, 2, 2)])
def test_any_number_of_devices_samples_what_one_device_samples(
    stages: int, contexts: int, size: int, tmp_path: Path
) -> None:
    """Batched, in chunks, swapped out, computed again, behind prefixes on the device and on the host."""
    case = two_layers("llama3_tied")
    case = dataclasses.replace(case, config={**case.config, "num_hidden_layers": stages})
    sizes = {"pipeline_parallel_size": stages, "context_parallel_size": contexts, "tensor_parallel_size": size}
    check_devices(case, [sizes], [*CHECKS], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "settings", "options", "sizes", "checks"),
    [
        ("llama3_tied", {"num_hidden_layers": 2}, {"attention_backend": "xla"}, {}, ["cached", "swapped"]),
        ("llama3_tied", {"num_hidden_layers": 2}, {"max_num_batched_tokens": 64}, {}, ["chunked", "batched"]),
        ("mistral_window", {"num_hidden_layers": 2}, {}, {}, ["chunked"]),
        ("gemma2", {"num_hidden_layers": 4}, {"kv_cache_dtype": "int8"}, {"pipeline_parallel_size": 2}, ["cached"]),
        ("mixtral", {}, {}, {}, ["cached", "swapped"]),
        ("mixtral", {}, {}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, ["cached"]),
        ("opt", {"num_hidden_layers": 2}, {}, {}, ["cached", "swapped"]),
    ],
)
def test_any_layers_are_the_same_in_stages(
    name: str,
    settings: dict[str, Any],
    options: dict[str, Any],
    sizes: dict[str, int],
    checks: list[str],
    tmp_path: Path,
) -> None:
    """Another backend, several microbatches of a stage, windows, scales of two groups, experts, learned positions."""
    case = tiny_case(name)
    case = dataclasses.replace(case, config={**case.config, **settings})
    stages = {"pipeline_parallel_size": settings.get("num_hidden_layers", 3)}
    check_devices(case, [{**stages, **sizes}], checks, tmp_path, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"num_scheduler_steps": 4},
        {"num_scheduler_steps": 1, "overlap": False},
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'},
        {"data_parallel_size": 2},
        {"quantization": "int8"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8", "tensor_parallel_size": 2, "context_parallel_size": 2},
        {"dtype": "bfloat16"},
    ],
)
def test_the_option_goes_with_others(options: dict[str, Any], tmp_path: Path) -> None:
    folder = write_model("llama3_tied", tmp_path)
    prompts = [*random_prompts([5, 9, 30, 1]), [7, 8, 9] * 9]
    alike = {name: value for name, value in options.items() if name in ("quantization", "dtype", "kv_cache_dtype")}
    with open_llm(folder, num_blocks=80, linear_backend="xla", **alike) as llm:
        want = generate(llm, prompts, PARAMS)
    with open_llm(folder, num_blocks=80, pipeline_parallel_size=2, **options) as llm:
        got = generate(llm, prompts, PARAMS)
        if options.get("dtype") == "bfloat16":  # sums in another order than one device
            assert got == generate(llm, prompts, PARAMS)
        else:
            assert_same(got, want, atol=1e-4)


def test_what_has_no_stages_is_refused_by_name() -> None:
    draft = '{"method": "draft_model", "model": "demo", "num_speculative_tokens": 3}'
    for options, problem in (({"speculative_config": draft}, "draft_model drafts are not split into stages"),):
        with pytest.raises(InvalidArgument, match=f"pipeline_parallel_size: 2: {problem}"):
            EngineConfig.load({"pipeline_parallel_size": 2, **options})


@pytest.mark.long
def test_layers_that_stages_cannot_share_are_refused(tmp_path: Path) -> None:
    folder = write_model("llama3_tied", tmp_path)
    with (
        pytest.raises(InvalidArgument, match=r"3 stages of equal layers cannot be made of 2 layers of 1 kinds; 1, 2"),
        open_llm(folder, pipeline_parallel_size=3),
    ):
        pass
