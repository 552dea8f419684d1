"""The devices that share contexts change no token: of any kind of request, however its memory is moved about."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument
from jpaged.types import SamplingParams
from tests.e2e.rig import assert_same, generate, open_llm, random_prompts, write_model
from tests.e2e.sharing_rig import make_executor
from tests.e2e.test_sharing import CHECKS, COMPANY, Job, alone, jobs, tokens
from tests.e2e.test_tensor_parallel import ALL_KINDS, two_layers
from tests.models.tiny import TinyCase, tiny_case, write_checkpoint

pytestmark = pytest.mark.usefixtures("quick_programs")

TWO_LAYERS = {"num_hidden_layers": 2}
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3)


def check_devices(case: TinyCase, sizes: list[dict[str, int]], checks: list[str], folder: Path, **options: Any) -> None:
    """Every kind of request alone on one device and on more; then the checks of sharing on those.

    Args:
        sizes: the options of each distribution over devices.
    """
    wanted = [Job(tuple(tokens(21, i)), params) for i, params in enumerate(ALL_KINDS.values())]
    executor = make_executor(case, folder, **options)
    want = [alone(executor, job) for job in wanted]
    executor.shutdown()
    for each in sizes:
        executor = make_executor(case, folder, **each, **options)
        assert executor.step.mesh.size == math.prod(size for name, size in each.items() if name.endswith("_size"))
        for job, one in zip(wanted, want, strict=True):
            many = alone(executor, job)
            assert many.sequences == one.sequences, (each, job.params)
            for index, value in one.cumulative_logprobs.items():
                assert many.cumulative_logprobs[index] == pytest.approx(value, abs=3e-4)
        for name in checks:
            CHECKS[name](executor, jobs(["greedy", "seeded", "four", "beams"], 4))
        executor.shutdown()


def check_same(case: TinyCase, sizes: list[tuple[int, int]], checks: list[str], folder: Path, **options: Any) -> None:
    """`check_devices` for devices that share contexts, and that share heads."""
    each = [{"context_parallel_size": contexts, "tensor_parallel_size": size} for contexts, size in sizes]
    check_devices(case, each, checks, folder, **options)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_any_number_of_devices_samples_what_one_device_samples(sizes: tuple[int, int], tmp_path: Path) -> None:
    """Batched, in chunks, swapped out, computed again, behind prefixes on the device and on the host."""
    check_same(two_layers("llama3_tied"), [sizes], [*CHECKS], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "settings", "options", "checks"),
    [
        ("llama3_tied", TWO_LAYERS, {"attention_backend": "xla"}, ["cached", "swapped"]),
        ("llama3_tied", TWO_LAYERS, {"kv_cache_dtype": "int8"}, ["cached", "swapped"]),
        ("deepseek_v2", {}, {}, ["cached", "swapped"]),
        ("mistral_window", TWO_LAYERS, {}, ["chunked"]),  # gives up what would be shared
        ("qwen2_window", TWO_LAYERS, {}, ["cached", "chunked"]),
        ("mixtral", {}, {}, ["cached", "swapped"]),
        ("opt", TWO_LAYERS, {}, ["cached", "swapped"]),
    ],
)
def test_any_attention_is_the_same_in_parts(
    name: str, settings: dict[str, Any], options: dict[str, Any], checks: list[str], tmp_path: Path
) -> None:
    """Another backend, 8 bits, latents, windows, with and without layers that see all, experts, learned positions."""
    case = tiny_case(name)
    case = dataclasses.replace(case, config={**case.config, **settings})
    check_same(case, [(2, 1), (4, 2)], checks, tmp_path, **options)


@pytest.mark.long
@pytest.mark.parametrize("name", ["swapped", "recomputed"])
def test_beams_go_on_after_preemption(name: str, tmp_path: Path) -> None:
    executor = make_executor(two_layers("llama3_tied"), tmp_path, context_parallel_size=2)
    CHECKS[name](executor, COMPANY["beams"])
    executor.shutdown()


@pytest.mark.parametrize("sizes", [{"context_parallel_size": 2}])
@pytest.mark.long
def test_the_option_splits_the_contexts_of_a_served_model(sizes: dict[str, int], tmp_path: Path) -> None:
    """Through the front door, log-probabilities included; several steps in a dispatch."""
    folder = write_model("llama3_tied", tmp_path)
    prompts = random_prompts([5, 9, 30, 1])
    with open_llm(folder, num_blocks=40) as llm:
        want = generate(llm, prompts, PARAMS)
    with open_llm(folder, num_blocks=40, **sizes) as llm:
        assert llm._serving.backend.num_devices == 2
        assert llm.config.cache.block_size == 32  # 16 on each device
        assert_same(generate(llm, prompts, PARAMS), want, atol=1e-5)
        assert_same(generate(llm, prompts, PARAMS), want, atol=1e-5)  # behind their own prefixes


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"num_scheduler_steps": 4},
        {"num_scheduler_steps": 1, "overlap": False},
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'},
        {"data_parallel_size": 2},
        {"enable_cascade_attention": False},
        {"kv_policy": "reserve-max", "enable_prefix_caching": False},
        {"max_num_batched_tokens": 64},
    ],
)
def test_the_option_goes_with_others(options: dict[str, Any], tmp_path: Path) -> None:
    folder = write_model("llama3_tied", tmp_path)
    prompts = [*random_prompts([5, 9, 30, 1]), [7, 8, 9] * 9]
    with open_llm(folder, num_blocks=80) as llm:
        want = generate(llm, prompts, PARAMS)
    with open_llm(folder, num_blocks=80, context_parallel_size=4, block_size=16, **options) as llm:
        assert_same(generate(llm, prompts, PARAMS), want, atol=1e-5)


@pytest.mark.long
def test_a_draft_model_proposes_over_contexts_in_parts(tmp_path: Path) -> None:
    folder = write_model("llama3_tied", tmp_path)
    draft = f'{{"method": "draft_model", "model": "{folder}", "num_speculative_tokens": 3}}'
    prompts = random_prompts([5, 9, 30])
    with open_llm(folder, num_blocks=80) as llm:
        want = generate(llm, prompts, PARAMS)
    options = {"max_num_batched_tokens": 64, "speculative_config": draft}
    with open_llm(folder, num_blocks=80, context_parallel_size=2, **options) as llm:
        assert_same(generate(llm, prompts, PARAMS), want, atol=1e-5)


@pytest.mark.long
def test_a_context_is_longer_than_the_pool_of_one_device(tmp_path: Path) -> None:
    """600 tokens are 75 KiB of keys and values; a pool has 32 KiB, and four devices have 128."""
    case = tiny_case("llama3_tied")
    config = {**case.config, "num_hidden_layers": 2, "max_position_embeddings": 1024}
    folder = write_checkpoint(dataclasses.replace(case, config=config), tmp_path)
    (prompt,) = random_prompts([600])
    bytes_per_token = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, their size, float32
    pool_bytes = 400 * bytes_per_token
    options = {"max_num_batched_tokens": 64}
    with open_llm(folder, **options) as llm:
        want = generate(llm, [prompt], PARAMS)
    with (
        open_llm(folder, kv_cache_memory_bytes=pool_bytes, **options) as llm,
        pytest.raises(InvalidArgument, match=r"608 tokens|blocks"),
    ):
        generate(llm, [prompt], PARAMS)
    with open_llm(folder, kv_cache_memory_bytes=pool_bytes, context_parallel_size=4, **options) as llm:
        pool = llm._serving.engine  # each device has no more than was said
        assert pool.load().num_blocks * 64 * bytes_per_token // 4 <= pool_bytes
        assert_same(generate(llm, [prompt], PARAMS), want, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_parallel_size": 16}, r"context_parallel_size: 16 parts of 1 devices each .* 16 devices; cpu has 8"),
        ({"context_parallel_size": 4, "tensor_parallel_size": 4}, "context_parallel_size: 4 parts of 4 devices each"),
        ({"context_parallel_size": 0}, "context_parallel_size: 0 is below the limit of 1"),
        ({"context_parallel_size": 4, "block_size": 6}, "block_size: 6 slots cannot be divided evenly among 4 devices"),
        (
            {"context_parallel_size": 4, "data_parallel_size": 4},
            r"data_parallel_size: 4 copies of the model on 4 devices each .*context_parallel_size.* 16 devices",
        ),
        (
            {
                "context_parallel_size": 2,
                "speculative_config": '{"method": "eagle3", "model": "x", "num_speculative_tokens": 2}',
            },
            "eagle3 runs on one",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_model("llama3_tied", tmp_path)
    with pytest.raises(InvalidArgument, match=message), open_llm(folder, **options):
        pass


def test_several_processes_may_share_contexts() -> None:
    options = {"context_parallel_size": 2, "coordinator": "h:1", "num_processes": 2, "process_id": 0}
    assert EngineConfig.load(options).parallel.context_parallel_size == 2


def test_a_window_is_cut_evenly_or_refused(tmp_path: Path) -> None:
    folder = write_model("mistral_window", tmp_path)
    with (
        pytest.raises(
            InvalidArgument, match="context_parallel_size: 3 does not divide the model's sliding window of 8"
        ),
        open_llm(folder, context_parallel_size=3),
    ):
        pass
