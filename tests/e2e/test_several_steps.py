"""Several decode steps in one dispatch change no token, whatever comes between, and nothing compiles meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jpaged.llm import LLM, TokensPrompt
from jpaged.types import CompletionOutput, SamplingParams
from tests.e2e.rig import engine_of, open_llm, random_prompts, write_model

PROMPTS = random_prompts([1, 2, 5, 8, 13, 17, 24, 33], seed=11)
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "max_model_len": 96,
    "num_blocks": 160,
    "wait_for_all_programs": True,
}


def params(place: int) -> SamplingParams:
    """Greedy and seeded, alone and several; lengths and ends differ, and none is a multiple of the steps."""
    kinds: list[dict[str, Any]] = [{"ignore_eos": True}, {"stop_token_ids": tuple(range(3, 20))}, {"stop": ("7,",)}]
    ends = kinds[place % 3]
    if place % 2 == 0:
        return SamplingParams(temperature=0.0, max_tokens=31 - place, **ends)
    return SamplingParams(temperature=0.9, top_p=0.95, seed=50 + place, n=1 + place % 3, max_tokens=29 - place, **ends)


PARAMS = [params(place) for place in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3_tied", tmp_path_factory.mktemp("model"), with_tokenizer=True)


def run(llm: LLM, places: list[int]) -> list[list[CompletionOutput]]:
    """The completions of some of the requests, together."""
    prompts = [TokensPrompt(prompt_token_ids=PROMPTS[place]) for place in places]
    return [list(output.outputs) for output in llm.generate(prompts, [PARAMS[place] for place in places])]


def told(completions: list[list[CompletionOutput]]) -> list[Any]:
    """All that is told of them."""
    return [[(one.token_ids, one.text, one.finish_reason) for one in several] for several in completions]


@pytest.fixture(scope="module")
def single(folder: Path) -> Iterator[list[Any]]:
    """Each request by itself, a step at a time."""
    with open_llm(folder, num_scheduler_steps=1, **OPTIONS) as llm:
        yield [told(run(llm, [place]))[0] for place in range(len(PROMPTS))]


@pytest.mark.long
def test_some_end_in_the_middle_and_some_at_their_limit(single: list[Any]) -> None:
    """Else the comparisons below would show less."""
    reasons = {reason for several in single for _, _, reason in several}
    assert {str(reason) for reason in reasons} >= {"length", "stop"}, reasons


@pytest.mark.long
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_steps", [2, 3, 8])
def test_the_tokens_are_the_same(
    folder: Path, single: list[Any], num_steps: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(folder, num_scheduler_steps=num_steps, overlap=overlap, **OPTIONS) as llm:
        dispatches = spy(llm, monkeypatch)
        assert [told(run(llm, [place]))[0] for place in range(len(PROMPTS))] == single
        assert told(run(llm, list(range(len(PROMPTS))))) == single
        assert told(run(llm, [3, 3, 0, 3])) == [single[3], single[3], single[0], single[3]]  # prefixes are cached
    assert max(dispatches) == num_steps


@pytest.mark.long
def test_dispatches_that_are_ended_early_change_no_token(
    folder: Path, single: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(folder, num_scheduler_steps=8, overlap=False, **OPTIONS) as llm:
        executor = engine_of(llm)._executor
        decode_interruptibly, executed = executor.decode_interruptibly, list[tuple[int, int]]()

        class Counted:
            def __init__(self, interrupt: Any, num_steps: int) -> None:
                self._interrupt, self._num_planned = interrupt, num_steps
                self.interrupt = interrupt.interrupt

            def close(self) -> int:
                num_steps: int = self._interrupt.close()
                executed.append((num_steps, self._num_planned))
                return num_steps

        def interrupted(inputs: Any, sampling: Any, ending_token_ids_rx: Any, num_steps: int) -> Any:
            handle, interrupt = decode_interruptibly(inputs, sampling, ending_token_ids_rx, num_steps)
            if len(executed) % 3:
                interrupt.interrupt()
            return handle, Counted(interrupt, num_steps)

        monkeypatch.setattr(executor, "decode_interruptibly", interrupted)
        assert told(run(llm, list(range(len(PROMPTS))))) == single
        engine_of(llm).check()
        assert engine_of(llm).load().num_blocks_used == 0
    assert any(num_steps == num_planned for num_steps, num_planned in executed)
    assert all(1 <= num_steps <= num_planned for num_steps, num_planned in executed)


@pytest.mark.long
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_preemption_changes_nothing(
    folder: Path, single: list[Any], preemption_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {**OPTIONS, "num_blocks": 24, "enable_prefix_caching": False}
    with open_llm(folder, num_scheduler_steps=4, preemption_mode=preemption_mode, **few) as llm:
        dispatches = spy(llm, monkeypatch)
        assert told(run(llm, list(range(len(PROMPTS))))) == single
        assert engine_of(llm).load().num_preemptions >= 1
    assert max(dispatches) > 1


@pytest.mark.long
def test_devices_that_share_a_model_change_nothing(
    folder: Path, single: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(folder, num_scheduler_steps=8, tensor_parallel_size=2, **OPTIONS) as llm:
        dispatches = spy(llm, monkeypatch)
        assert told(run(llm, list(range(len(PROMPTS))))) == single
    assert max(dispatches) == 8


def spy(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of each dispatch of several, from now on."""
    executor, dispatches = engine_of(llm)._executor, []
    decode = executor.decode

    def spied(inputs: Any, sampling: Any, ending_token_ids_rx: Any, num_steps: int) -> Any:
        dispatches.append(num_steps)
        return decode(inputs, sampling, ending_token_ids_rx, num_steps)

    decode_interruptibly = executor.decode_interruptibly

    def spied_interruptibly(inputs: Any, sampling: Any, ending_token_ids_rx: Any, num_steps: int) -> Any:
        dispatches.append(num_steps)
        return decode_interruptibly(inputs, sampling, ending_token_ids_rx, num_steps)

    monkeypatch.setattr(executor, "decode", spied)
    monkeypatch.setattr(executor, "decode_interruptibly", spied_interruptibly)
    return dispatches
