"""A request's tokens are its own: alone, in company, in chunks, preempted, overlapped or not, they are the same.

Sixteen requests run under every condition; half are greedy, half sampled with a seed and every truncation.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jpaged.llm import LLM
from jpaged.types import CompletionOutput, SamplingParams
from tests.e2e.rig import assert_same, engine_of, generate, open_llm, random_prompts, write_model
from tests.models.tiny import tiny_case, write_checkpoint

PROMPTS = random_prompts([1, 2, 3, 5, 8, 13, 16, 17, 20, 24, 31, 32, 33, 40, 47, 48], seed=7)
MAX_MODEL_LEN = 96
# What every engine here has in common, so that most of their programs are the same.
OPTIONS = {"max_num_seqs": 16, "max_num_batched_tokens": 16, "block_size": 8, "max_model_len": MAX_MODEL_LEN}
ENOUGH_BLOCKS = 16 * MAX_MODEL_LEN // 8
LONGEST_ALONE = 10  # blocks that the longest request fills: less than two of them fit beside each other


def params(place: int) -> SamplingParams:
    """Even places are greedy; odd ones are sampled. Lengths differ, and so does what is cut off."""
    if place % 2 == 0:
        return SamplingParams(temperature=0.0, max_tokens=32 - place % 5, logprobs=place % 4, ignore_eos=True)
    return SamplingParams(
        temperature=0.8,
        top_k=(0, 40, 7)[place % 3],
        top_p=(0.9, 1.0)[place % 4 // 2],
        min_p=(0.0, 0.02)[place % 8 // 4],
        seed=1000 + place,
        max_tokens=32 - place % 5,
        logprobs=0,
        ignore_eos=True,
    )


PARAMS = [params(place) for place in range(16)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3_tied", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder, num_blocks=ENOUGH_BLOCKS, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[CompletionOutput]:
    """Each request by itself, the truth for the others."""
    return [generate(llm, [prompt], how)[0] for prompt, how in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.long
def test_requests_differ_from_each_other(alone: list[CompletionOutput]) -> None:
    """Else the comparisons below would show nothing."""
    assert len({completion.token_ids[:24] for completion in alone}) == 16
    assert all(len(set(completion.token_ids)) > 4 for completion in alone)


@pytest.mark.long
def test_sampled_tokens_depend_on_the_seed(llm: LLM, alone: list[CompletionOutput]) -> None:
    others = [SamplingParams(temperature=0.8, seed=seed, max_tokens=28, logprobs=0) for seed in range(8)]
    sampled = generate(llm, [PROMPTS[9]] * 8, others)
    assert len({completion.token_ids for completion in [*sampled, alone[9]]}) == 9


def test_company_changes_nothing(llm: LLM, alone: list[CompletionOutput]) -> None:
    assert_same(generate(llm, PROMPTS, PARAMS), alone)


@pytest.mark.long
def test_the_order_of_arrival_changes_nothing(llm: LLM, alone: list[CompletionOutput]) -> None:
    assert_same(generate(llm, PROMPTS[::-1], PARAMS[::-1]), alone[::-1])


@pytest.mark.long
def test_larger_chunks_change_nothing(folder: Path, alone: list[CompletionOutput]) -> None:
    """The others prefill at most 16 tokens a step, decoding rows included; here it is 32."""
    with open_llm(folder, num_blocks=ENOUGH_BLOCKS, **{**OPTIONS, "max_num_batched_tokens": 32}) as llm:
        assert_same(generate(llm, PROMPTS, PARAMS), alone)


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.long)])
def test_preemption_changes_nothing(folder: Path, alone: list[CompletionOutput], overlap: bool) -> None:
    with open_llm(folder, num_blocks=LONGEST_ALONE + 2, overlap=overlap, **OPTIONS) as llm:
        completions = generate(llm, PROMPTS, PARAMS)
        assert engine_of(llm).load().num_preemptions >= 8
    assert_same(completions, alone)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["lfu", "2q", "worth"])
def test_what_is_evicted_changes_nothing(folder: Path, alone: list[CompletionOutput], policy: str) -> None:
    with open_llm(folder, num_blocks=LONGEST_ALONE + 2, eviction_policy=policy, **OPTIONS) as llm:
        for _ in range(2):
            assert_same(generate(llm, PROMPTS, PARAMS), alone)
        assert engine_of(llm).load().num_prefix_hit_tokens > 0


@pytest.mark.long
def test_steps_without_overlap_change_nothing(folder: Path, alone: list[CompletionOutput]) -> None:
    with open_llm(folder, num_blocks=ENOUGH_BLOCKS, overlap=False, **OPTIONS) as llm:
        assert_same(generate(llm, PROMPTS, PARAMS), alone)
        assert_same([generate(llm, [PROMPTS[4]], PARAMS[4])[0]], alone[4:5])


def check_company_and_preemption(folder: Path, dtype: str, mode: str, num_blocks: int) -> None:
    """What is computed again is rounded as before: not a bit of a log-probability changes."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "block_size": 8, "max_model_len": 64}
    prompts, how = PROMPTS[4:12], PARAMS[4:12]
    with open_llm(folder, num_blocks=num_blocks, dtype=dtype, preemption_mode=mode, **sizes) as llm:
        alone = [generate(llm, [prompt], one)[0] for prompt, one in zip(prompts, how, strict=True)]
        assert engine_of(llm).load().num_preemptions == 0
        assert_same(generate(llm, prompts[::-1], how[::-1]), alone[::-1], atol=0.0)
        assert engine_of(llm).load().num_preemptions >= 2
    assert len({completion.token_ids for completion in alone}) == len(alone)


@pytest.mark.long
@pytest.mark.parametrize(("name", "mode", "num_blocks"), [("gemma3", "recompute", 24), ("qwen3_tied", "swap", 10)])
def test_company_and_preemption_change_nothing_in_bfloat16(
    tmp_path: Path, name: str, mode: str, num_blocks: int
) -> None:
    check_company_and_preemption(write_checkpoint(tiny_case(name), tmp_path), "bfloat16", mode, num_blocks)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mode", "num_blocks"),
    [("qwen3_tied", "recompute", 10), ("mixtral", "swap", 10), ("deepseek_v2", "recompute", 10)],
)
def test_company_and_preemption_change_nothing_in_float16(
    tmp_path: Path, name: str, mode: str, num_blocks: int
) -> None:
    check_company_and_preemption(write_checkpoint(tiny_case(name), tmp_path), "float16", mode, num_blocks)


def check_larger_chunks(folder: Path, dtype: str) -> None:
    options = {**OPTIONS, "dtype": dtype, "num_blocks": ENOUGH_BLOCKS}
    with open_llm(folder, **options) as small, open_llm(folder, **{**options, "max_num_batched_tokens": 32}) as large:
        assert_same(generate(large, PROMPTS, PARAMS), generate(small, PROMPTS, PARAMS), atol=0.0)


@pytest.mark.long
def test_larger_chunks_change_nothing_in_bfloat16(folder: Path) -> None:
    check_larger_chunks(folder, "bfloat16")


@pytest.mark.long
def test_larger_chunks_change_nothing_in_float16(folder: Path) -> None:
    check_larger_chunks(folder, "float16")


@pytest.mark.long
def test_dynamic_rope_replays_what_it_computed(tmp_path: Path) -> None:
    """Its rotations depend on the length that a sequence had when each token was computed, also after a preemption."""
    folder = write_model("llama_dynamic_long", tmp_path)
    prompts, how = random_prompts([80, 40, 60, 70], seed=3), SamplingParams(temperature=0.0, max_tokens=40, logprobs=0)
    with open_llm(folder, num_blocks=16, block_size=8, max_model_len=128) as llm:
        alone = [generate(llm, [prompt], how)[0] for prompt in prompts]
        assert engine_of(llm).load().num_preemptions == 0
        assert_same(generate(llm, prompts, how), alone)
        assert engine_of(llm).load().num_preemptions >= 1
