"""The devices that share a model change no token: of any kind of request, in company, preempted, or behind a prefix."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from jpaged.errors import InvalidArgument
from jpaged.types import SamplingParams
from tests.e2e.rig import assert_same, generate, open_llm, random_prompts, write_model
from tests.e2e.sharing_rig import make_executor, make_executors
from tests.e2e.test_sharing import CHECKS, KINDS, Job, alone, jobs, tokens
from tests.models.tiny import TinyCase, tiny_case

pytestmark = pytest.mark.usefixtures("quick_programs")

ALL_KINDS = {
    **KINDS,
    "top_k": SamplingParams(temperature=1.2, top_k=7, seed=11, max_tokens=30),
    "min_p": SamplingParams(temperature=1.0, min_p=0.08, top_p=0.97, seed=12, max_tokens=30),
}


def two_layers(name: str) -> TinyCase:
    """A tiny checkpoint, quicker to compile."""
    return TinyCase(name, {**tiny_case(name).config, "num_hidden_layers": 2}, 24)


CASES = {name: two_layers(name) for name in ("llama3_tied", "qwen3_tied", "mistral_mqa", "llama_mha", "opt")}
"""Key/value heads 2, 8, 1, 4 and 4 of 8, 16, 8, 4 and 4; tied and not; 131 tokens, which nothing divides."""


def check_same(case: TinyCase, sizes: list[tuple[int, int]], checks: list[str], folder: Path) -> None:
    """Every kind of request alone on one device and on more; then the checks of sharing on those.

    Args:
        sizes: copies of the model, and devices of each.
    """
    wanted = [Job(tuple(tokens(21, i)), params) for i, params in enumerate(ALL_KINDS.values())]
    executor = make_executor(case, folder)
    want = [alone(executor, job) for job in wanted]
    executor.shutdown()
    for num_replicas, size in sizes:
        executors = make_executors(case, folder, data_parallel_size=num_replicas, tensor_parallel_size=size)
        for executor, (job, one) in itertools.product(executors, zip(wanted, want, strict=True)):
            many = alone(executor, job)
            assert many.sequences == one.sequences, (size, job.params)
            for index, value in one.cumulative_logprobs.items():
                assert many.cumulative_logprobs[index] == pytest.approx(value, abs=3e-4)
        for name in checks:
            CHECKS[name](
                executors if num_replicas > 1 else executors[0], jobs(["greedy", "seeded", "beams"], 6 * num_replicas)
            )
        for executor in executors:
            executor.shutdown()


@pytest.mark.long
def test_a_device_that_shares_samples_what_one_device_samples(tmp_path: Path) -> None:
    """Two key/value heads on four devices: each is kept twice."""
    check_same(CASES["llama3_tied"], [(1, 4)], ["cached"], tmp_path)


MOVES = ["swapped", "cached"]
"""What moves blocks, of which each device has its heads' part: the other checks know of no heads."""


# More, as many and fewer key/value heads than devices, of each number of devices.
@pytest.mark.parametrize(
    ("name", "sizes", "checks"),
    [
        pytest.param("llama3_tied", [2, 8], [*CHECKS], marks=pytest.mark.long),
        pytest.param("qwen3_tied", [4], MOVES, marks=pytest.mark.deep),
        pytest.param("mistral_mqa", [8], MOVES, marks=pytest.mark.deep),
        pytest.param("llama_mha", [4], MOVES, marks=pytest.mark.long),
        pytest.param("opt", [2], MOVES, marks=pytest.mark.deep),
    ],
)
def test_any_number_of_devices_samples_what_one_device_samples(
    name: str, sizes: list[int], checks: list[str], tmp_path: Path
) -> None:
    check_same(CASES[name], [(1, size) for size in sizes], checks, tmp_path)


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "int8"])
@pytest.mark.thinned(2)
def test_the_option_splits_a_served_model(kv_cache_dtype: str, tmp_path: Path) -> None:
    """Through the front door, log-probabilities included; the pool's scales are split too."""
    folder = write_model("llama3_tied", tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3)
    prompts = random_prompts([5, 9, 30])
    options = {"kv_cache_dtype": kv_cache_dtype, "num_blocks": 40}
    with open_llm(folder, **options) as llm:
        want = generate(llm, prompts, params)
    with open_llm(folder, tensor_parallel_size=2, **options) as llm:
        assert llm._serving.backend.num_devices == 2
        got = generate(llm, prompts, params)
    assert_same(got, want, atol=1e-5)
    for a, b in zip(got, want, strict=True):
        assert a.logprobs is not None
        assert b.logprobs is not None
        for at_a, at_b in zip(a.logprobs, b.logprobs, strict=True):
            assert [top.token_id for top in at_a.top] == [top.token_id for top in at_b.top]
            np.testing.assert_allclose([top.logprob for top in at_a.top], [top.logprob for top in at_b.top], atol=1e-5)


@pytest.mark.long
def test_the_demo_model_is_restored_in_parts() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0)
    prompts = [[5, 6, 7, 8], list(range(40, 70))]
    with open_llm("demo", num_blocks=80) as llm:
        want = generate(llm, prompts, params)
    with open_llm("demo", num_blocks=80, tensor_parallel_size=8) as llm:
        assert_same(generate(llm, prompts, params), want)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (3, "tensor_parallel_size: 3 does not divide 8 query heads, 2 key/value heads .*; 1, 2, 4, 8 work"),
        (16, "tensor_parallel_size: requires 16 devices; cpu has 8"),
        (0, "tensor_parallel_size: 0 is below the limit of 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(size: int, message: str, tmp_path: Path) -> None:
    folder = write_model("llama3_tied", tmp_path)
    with pytest.raises(InvalidArgument, match=message), open_llm(folder, tensor_parallel_size=size):
        pass
