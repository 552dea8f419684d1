"""What the harness asks, on a real engine: against scores of each pair alone, and against what the engine generates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jpaged.errors import InvalidArgument
from jpaged.evaluation.backends import ContinuationGroup, Likelihood, OfflineBackend, Pair, TokenIds
from jpaged.evaluation.runner import EvaluationOptions, EvaluationRunner, Texts
from jpaged.llm import LLM, MakeBar, TokensPrompt
from jpaged.types import RequestOutput, SamplingParams
from tests.e2e.rig import open_llm, random_prompts, write_model

pytestmark = pytest.mark.usefixtures("quick_programs")

MAX_MODEL_LEN = 64


class Counted:
    """A backend that counts what it is asked."""

    def __init__(self, inner: OfflineBackend) -> None:
        self._inner = inner
        self.max_model_len = inner.max_model_len
        self.completed: list[tuple[TokenIds, SamplingParams]] = []
        self.scored: list[ContinuationGroup] = []

    def complete(
        self, prompts: Sequence[TokenIds], sampling: Sequence[SamplingParams], use_tqdm: bool | MakeBar
    ) -> list[RequestOutput]:
        self.completed += zip(prompts, sampling, strict=True)
        return self._inner.complete(prompts, sampling, use_tqdm)

    def score(self, groups: Sequence[ContinuationGroup], use_tqdm: bool | MakeBar) -> list[list[Likelihood]]:
        self.scored += groups
        return self._inner.score(groups, use_tqdm)

    def close(self) -> None:
        self._inner.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3_tied", tmp_path_factory.mktemp("model"), with_tokenizer=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    options = {"max_model_len": MAX_MODEL_LEN, "block_size": 4, "num_blocks": 200, "max_num_batched_tokens": 32}
    with open_llm(folder, **options) as llm:
        yield llm


def runner_of(llm: LLM, folder: Path, **options: Any) -> tuple[EvaluationRunner, Counted]:
    backend = Counted(OfflineBackend(llm))
    asked = EvaluationOptions(model="tiny", prefix_token_id=3, **options)
    return EvaluationRunner(backend, Texts.load(folder, prefix_token_id=3), asked), backend


def alone(llm: LLM, pair: Pair) -> Likelihood:
    """The score of one pair by itself."""
    (score,) = llm.score_continuations(TokensPrompt(prompt_token_ids=list(pair[0])), [list(pair[1])])[0]
    return score.logprob, score.is_greedy


@pytest.mark.long
def test_pairs_have_the_scores_that_each_has_alone(llm: LLM, folder: Path) -> None:
    runner, backend = runner_of(llm, folder)
    contexts, tails = random_prompts([9, 17], seed=1), random_prompts([1, 1, 3, 6], seed=2)
    greedy = llm.generate(TokensPrompt(prompt_token_ids=contexts[0]), SamplingParams(max_tokens=3, temperature=0.0))
    best = list(greedy[0].outputs[0].token_ids)
    pairs: list[Pair] = [*itertools.product(contexts, tails), (contexts[0], best), (contexts[0], best[:1])]
    pairs += [pairs[2], (contexts[1], [])]
    found = runner.loglikelihoods(pairs)
    for pair, (logprob, is_greedy) in zip(pairs[:-1], found, strict=False):
        want, want_greedy = alone(llm, pair)
        assert logprob == pytest.approx(want, abs=1e-4)
        assert is_greedy == want_greedy
    assert [is_greedy for _, is_greedy in found[8:10]] == [True, True]
    assert found[-1] == (0.0, True)
    assert sorted(len(group.continuations) for group in backend.scored) == [2, 3]
    assert sorted(len(sampling.logprob_token_ids) for _, sampling in backend.completed) == [2, 3]


@pytest.mark.parametrize("max_length", [None, 20])
@pytest.mark.long
def test_long_contexts_lose_their_beginning(llm: LLM, folder: Path, max_length: int | None) -> None:
    runner, _ = runner_of(llm, folder, max_length=max_length)
    kept = (max_length or MAX_MODEL_LEN - 2) + 1
    assert runner.max_length == kept - 1
    context, tail = random_prompts([90, 5], seed=3)
    ((logprob, _),) = runner.loglikelihoods([(context, tail)])
    assert logprob == pytest.approx(alone(llm, (context[-(kept - 5) :], tail))[0], abs=1e-4)


def test_a_length_that_the_model_has_not_is_refused(llm: LLM, folder: Path) -> None:
    with pytest.raises(InvalidArgument, match=rf"^max_length: .* from 1 to {MAX_MODEL_LEN - 2}"):
        runner_of(llm, folder, max_length=MAX_MODEL_LEN - 1)


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(f"{token_id}," for token_id in token_ids)


def greedy_tokens(llm: LLM, prompt: Sequence[int], num: int) -> list[int]:
    sampling = SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=True)
    return list(llm.generate(TokensPrompt(prompt_token_ids=list(prompt)), sampling)[0].outputs[0].token_ids)


def test_texts_end_where_the_task_says(llm: LLM, folder: Path) -> None:
    runner, backend = runner_of(llm, folder)
    prompt = random_prompts([12], seed=4)[0]
    tokens = greedy_tokens(llm, prompt, 10)
    end = f"{tokens[4]},"
    want = text_of(tokens).partition(end)[0]
    asked = {"until": [end], "max_gen_toks": 10, "ignore_eos": True}
    assert runner.generate([(text_of(prompt), asked)]) == [want]
    assert runner.generate([(text_of(prompt), {**asked, "until": []})]) == [text_of(tokens)]
    assert backend.completed[0][0] == tuple(prompt)


def test_long_contexts_leave_room_for_what_is_generated(llm: LLM, folder: Path) -> None:
    runner, backend = runner_of(llm, folder, max_length=30)
    prompt = random_prompts([50], seed=5)[0]
    runner.generate([(text_of(prompt), {"max_gen_toks": 8}), ("", {"max_gen_toks": 8})])
    assert [asked for asked, _ in backend.completed] == [tuple(prompt[-22:]), (3,)]
    with pytest.raises(InvalidArgument, match=r"^max_gen_toks: "):
        runner.generate([(text_of(prompt), {"max_gen_toks": 30})])


def test_sampled_texts_are_a_function_of_seed_and_place(llm: LLM, folder: Path) -> None:
    prompt = text_of(random_prompts([6], seed=6)[0])
    asked = {"do_sample": True, "max_gen_toks": 8, "ignore_eos": True}
    first, again, other = (runner_of(llm, folder, seed=seed)[0].generate([(prompt, asked)] * 3) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 3


@pytest.mark.long
def test_answers_begin_behind_the_thinking(llm: LLM, folder: Path) -> None:
    prompt = random_prompts([7], seed=7)[0]
    tokens = greedy_tokens(llm, prompt, 8)
    place = len(tokens) - 1 - tokens[::-1].index(tokens[2])
    want = text_of(tokens[place + 1 :])
    asked = {"max_gen_toks": 8, "ignore_eos": True}
    for end in (tokens[2], f"{tokens[2]},"):
        runner, _ = runner_of(llm, folder, think_end_token=end)
        assert runner.generate([(text_of(prompt), asked)]) == [want]
