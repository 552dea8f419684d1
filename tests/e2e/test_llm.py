"""The offline face over a real engine: several sequences of a request, and options that reach the engine."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from jpaged import LLM, SamplingParams
from jpaged.engine.kv_cache.paged import PagedKVCacheManager
from jpaged.engine.scheduler.policies import ByPriority
from jpaged.errors import InvalidArgument
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


@pytest.mark.long
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
    assert isinstance(memory, PagedKVCacheManager)
    assert memory.prefixes is not None
    assert llm._serving.engine.geometry.num_host_blocks == int(0.001 * 2**30) // (3 * 8 * 2 * 2 * 32 * 4)


@pytest.mark.long
def test_a_batch_has_no_newcomers_unless_a_number_of_steps_is_given() -> None:
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 64, "num_blocks": 32}
    with LLM("demo", **sizes) as several, LLM("demo", **sizes, num_scheduler_steps=1) as single:
        assert several.config.scheduler.num_scheduler_steps == -1
        assert single.config.scheduler.num_scheduler_steps == 1
        greedy = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)
        (first,), (second,) = several.generate(PROMPT, greedy), single.generate(PROMPT, greedy)
        assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_a_prompt_whose_keys_are_its_own_is_not_cached(llm: LLM) -> None:
    """With a dynamic rope nothing of a prompt beyond the length of pretraining is like that of another."""
    params = SamplingParams(temperature=0.0, max_tokens=2)
    short: TokensPrompt = {"prompt_token_ids": list(range(3, 43))}
    long: TokensPrompt = {"prompt_token_ids": list(range(3, 83))}
    for prompt, cached in ((short, 0), (short, 39), (long, 0), (long, 0)):
        (answer,) = llm.generate(prompt, params)
        assert answer.usage.cached_tokens == cached


class Bar:
    """What a caller's own `use_tqdm` made, and what it was told."""

    made: ClassVar[list[Bar]] = []

    def __init__(self, **options: Any) -> None:
        self.options, self.shown, self.num_closed = options, 0, 0
        self.postfix = ""
        Bar.made.append(self)

    def update(self, count: int) -> None:
        assert not self.num_closed
        self.shown += count

    def close(self) -> None:
        self.num_closed += 1


def test_a_bar_of_the_callers_own_is_told_of_every_prompt(llm: LLM) -> None:
    Bar.made.clear()
    llm.generate([PROMPT] * 5, SamplingParams(max_tokens=2, ignore_eos=True, n=2), use_tqdm=Bar)
    (bar,) = Bar.made
    assert (bar.options["total"], bar.shown, bar.num_closed) == (5, 5, 1)
    assert re.fullmatch(r"input: [\d.]+ tok/s, output: [\d.]+ tok/s", bar.postfix)


class InterruptedBar(Bar):
    """Ctrl-C comes when the first prompt is done."""

    def update(self, count: int) -> None:
        super().update(count)
        raise KeyboardInterrupt


def test_what_was_interrupted_closes_its_bar_and_leaves_its_places_to_the_next_call(llm: LLM) -> None:
    Bar.made.clear()
    params = SamplingParams(seed=5, max_tokens=2, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 20, params, use_tqdm=InterruptedBar)
    assert [(bar.shown, bar.num_closed) for bar in Bar.made] == [(1, 1)]
    assert len(llm.generate([PROMPT] * 20, params)) == 20


@pytest.mark.parametrize(("is_terminal", "use_tqdm"), [(True, True), (True, False), (False, True)])
def test_a_bar_is_shown_on_terminals_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool, use_tqdm: bool
) -> None:
    shows = is_terminal and use_tqdm
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    llm.generate([PROMPT] * 3, SamplingParams(max_tokens=1), use_tqdm=use_tqdm)
    assert ("Processed prompts: 100%" in stderr.getvalue()) == shows
    assert bool(stderr.getvalue()) == shows


def test_counts_and_times_are_there_for_who_measures(llm: LLM) -> None:
    before, begin_s = llm.load(), time.monotonic()
    outputs = llm.generate([PROMPT] * 3, SamplingParams(max_tokens=4, ignore_eos=True, use_prefix_cache=False))
    after, end_s = llm.load(), time.monotonic()
    assert after.num_generation_tokens - before.num_generation_tokens == 12
    assert after.num_steps > before.num_steps
    for output in outputs:
        times = output.times
        assert times is not None
        later = (times.first_scheduled_s, times.first_token_s, times.last_token_s)
        marks = [times.arrival_s, *(mark for mark in later if mark is not None)]
        assert len(marks) == 4
        assert marks == sorted(marks)
        assert begin_s <= times.arrival_s
        assert (times.last_token_s or 0.0) <= end_s


def test_a_reset_makes_prompts_run_as_if_none_had_run_before(llm: LLM) -> None:
    short: TokensPrompt = {"prompt_token_ids": list(range(7, 47))}
    params = SamplingParams(temperature=0.0, max_tokens=1)
    assert [llm.generate(short, params)[0].usage.cached_tokens for _ in range(2)] == [0, 39]
    assert llm.reset_prefix_cache() >= 5
    assert llm.load().num_blocks_cached == 0
    assert llm.reset_prefix_cache() == 0
    assert llm.generate(short, params)[0].usage.cached_tokens == 0


@pytest.mark.parametrize(
    ("given", "named"), [({"sampling_params": []}, "sampling_params"), ({"adapter": []}, "adapter")]
)
def test_a_list_that_is_empty_is_not_taken_for_the_default(llm: LLM, given: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{named}: 0 given for 1 prompts"):
        llm.generate("Once", **given)


@pytest.mark.long
def test_text_is_not_made_where_nobody_wants_it() -> None:
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64, "num_blocks": 32}
    with LLM("demo", **sizes, wait_for_all_programs=False) as demo:
        base: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
        texts = demo.generate(["Once upon a time"] * 2, [SamplingParams(detokenize=d, **base) for d in (True, False)])
        beams = demo.generate("Once", SamplingParams(detokenize=False, beam_width=2, max_tokens=4))
    (told,), (silent,) = (output.outputs for output in texts)
    assert told.text
    assert (silent.text, silent.token_ids) == ("", told.token_ids)
    assert beams[0].outputs[0].text == ""
    with pytest.raises(InvalidArgument, match=r"^stop: .* must be empty if detokenize is false"):
        SamplingParams(detokenize=False, stop="x")
