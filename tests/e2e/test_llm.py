"""The offline face over a real engine: several sequences of a request, and options that reach the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jpaged import LLM, SamplingParams
from jpaged.engine.kv.paged import PagedMemory
from jpaged.engine.scheduling.scheduler import ByPriority
from jpaged.llm import TokensPrompt
from jpaged.types import CompletionOutput
from tests.e2e.rig import engine_of
from tests.models.tiny import tiny_case, write_checkpoint

PROMPT: TokensPrompt = {"prompt_token_ids": tiny_case("llama_dynamic_short").prompt()}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_checkpoint(tiny_case("llama_dynamic_short"), tmp_path_factory.mktemp("llm"))
    options: dict[str, Any] = {
        "policy": "priority",
        "preemption_mode": "swap",
        "swap_space": 0.001,
        "num_blocks": 40,
        "max_num_queued_reqs": 1,
    }
    with LLM(str(folder), max_num_seqs=8, max_num_batched_tokens=8, block_size=8, **options) as llm:
        yield llm


def told_sum(output: CompletionOutput) -> float:
    assert output.cumulative_logprob is not None
    return output.cumulative_logprob


def test_the_sequences_of_a_request_come_in_order_of_index(llm: LLM) -> None:
    one = SamplingParams(seed=5, max_tokens=6, ignore_eos=True)
    many = SamplingParams(seed=5, n=3, max_tokens=6, ignore_eos=True, logprobs=1)
    (single,), (several,) = llm.generate(PROMPT, one), llm.generate(PROMPT, many)
    assert [output.index for output in several.outputs] == [0, 1, 2]
    assert several.outputs[0].token_ids == single.outputs[0].token_ids
    assert len({output.token_ids for output in several.outputs}) == 3
    for output in several.outputs:
        assert len(output.token_ids) == 6
        assert output.finish_reason == "length"
        assert output.logprobs is not None
        total = sum(position.chosen.logprob for position in output.logprobs)
        assert output.cumulative_logprob == pytest.approx(total, abs=1e-4)
    assert several.usage.completion_tokens == 18
    assert single.outputs[0].cumulative_logprob is None


def test_best_of_returns_the_likeliest_first(llm: LLM) -> None:
    base: dict[str, Any] = {"seed": 8, "max_tokens": 5, "ignore_eos": True}
    (every,) = llm.generate(PROMPT, SamplingParams(n=4, logprobs=0, **base))
    (best,) = llm.generate(PROMPT, SamplingParams(n=2, best_of=4, **base))
    ranked = sorted(every.outputs, key=lambda output: -told_sum(output))
    assert [output.token_ids for output in best.outputs] == [output.token_ids for output in ranked[:2]]
    assert [output.index for output in best.outputs] == [0, 1]


def test_beams_come_best_first(llm: LLM) -> None:
    (found,) = llm.generate(PROMPT, SamplingParams(beam_width=4, n=3, max_tokens=5, ignore_eos=True))
    scores = [told_sum(output) for output in found.outputs]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)


def test_options_reach_the_engine(llm: LLM) -> None:
    scheduler, memory = engine_of(llm)._loop.scheduler, engine_of(llm)._loop.memory
    assert (type(scheduler._policy), scheduler._preemption.mode, scheduler._is_static) == (ByPriority, "swap", False)
    assert isinstance(memory, PagedMemory)
    assert memory.prefixes is not None
    assert llm._serving.engine.geometry.num_host_blocks == int(0.001 * 2**30) // (3 * 8 * 2 * 2 * 32 * 4)


def test_a_prompt_whose_keys_are_its_own_is_not_cached(llm: LLM) -> None:
    """With a dynamic rope nothing of a prompt beyond the length of pretraining is like that of another."""
    params = SamplingParams(temperature=0.0, max_tokens=2)
    short: TokensPrompt = {"prompt_token_ids": list(range(3, 43))}
    long: TokensPrompt = {"prompt_token_ids": list(range(3, 83))}
    for prompt, cached in ((short, 0), (short, 39), (long, 0), (long, 0)):
        (answer,) = llm.generate(prompt, params)
        assert answer.usage.cached_tokens == cached


def test_what_was_interrupted_leaves_its_places_to_the_next_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, params = engine_of(llm), SamplingParams(seed=5, max_tokens=2, ignore_eos=True)

    def interrupt() -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT] * 20, params)
    assert len(llm.generate([PROMPT] * 20, params)) == 20
