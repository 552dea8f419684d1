"""Log-probabilities of prompts, scores of continuations and embeddings of a real engine, against dense attention."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints.weights import load_params
from jpaged.errors import InvalidArgument
from jpaged.llm import LLM, TokensPrompt
from jpaged.models.hf_config import from_hf
from jpaged.models.model import Model
from jpaged.models.tokens import TokenBatch
from jpaged.types import SamplingParams
from tests.e2e.rig import VOCAB_SIZE, engine_of, open_llm, random_prompts, write_model
from tests.models import dense

pytestmark = pytest.mark.usefixtures("quick_programs")

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "max_model_len": 96,
    "num_blocks": 200,
    "max_logprobs": -1,
}
WAYS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "without overlap": {"overlap": False},
    "in a short memory": {"num_blocks": 26},
    "on two devices": {"tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3_tied", tmp_path_factory.mktemp("model"), with_tokenizer=True)


LONG_WAYS = ("without overlap", "in a short memory", "on two devices")


@pytest.fixture(
    scope="module", params=[pytest.param(way, marks=pytest.mark.long) if way in LONG_WAYS else way for way in WAYS]
)
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with open_llm(folder, **{**OPTIONS, **WAYS[request.param]}) as llm:
        yield llm


@dataclasses.dataclass(frozen=True)
class Truth:
    """The model with dense attention."""

    model: Model
    params: Any

    @classmethod
    def of(cls, folder: Path) -> Truth:
        model = Model(from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8"))), np.dtype("float32"))
        return cls(model, load_params(model, folder, "loop"))

    def logprobs(self, token_ids: list[int]) -> np.ndarray:
        """`[T, V]`, behind each token."""
        padded = np.zeros(OPTIONS["max_model_len"], np.int32)
        padded[: len(token_ids)] = token_ids
        x = np.asarray(dense.logits(self.model, self.params, jnp.asarray(padded), jnp.int32(1)), np.float64)
        x = x[: len(token_ids)]
        return x - x.max(axis=1, keepdims=True) - np.log(np.exp(x - x.max(axis=1, keepdims=True)).sum(axis=1))[:, None]

    def hidden(self, token_ids: list[int]) -> np.ndarray:
        """`[T, E]`, behind the last norm."""
        positions = jnp.arange(len(token_ids), dtype=jnp.int32)
        batch = TokenBatch(jnp.asarray(token_ids, jnp.int32), positions, positions + 1)
        hidden, _ = self.model.run(self.params, batch, dense.attend, (), "loop")
        return np.asarray(self.model.normed(self.params, hidden))


@pytest.fixture(scope="module")
def truth(folder: Path) -> Truth:
    return Truth.of(folder)


PROMPTS = random_prompts([1, 2, 9, 31, 48, 77], seed=11)


@pytest.mark.long
@pytest.mark.parametrize("num_top", [0, 5, -1])
def test_prompts_are_told_as_dense_attention_has_them(llm: LLM, truth: Truth, num_top: int) -> None:
    how = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=num_top, ignore_eos=True)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS], how)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        want = truth.logprobs(prompt)
        for place, position in enumerate(output.prompt_logprobs[1:], start=1):
            assert position is not None
            row, token = want[place - 1], prompt[place]
            assert position.chosen.token_id == token
            assert position.chosen.logprob == pytest.approx(row[token], abs=1e-4)
            assert position.chosen.rank in (1 + (row > row[token] + 1e-5).sum(), 1 + (row > row[token] - 1e-5).sum())
            assert len(position.top) == (VOCAB_SIZE if num_top < 0 else num_top)
            best = np.sort(row)[::-1][: len(position.top)]
            np.testing.assert_allclose([one.logprob for one in position.top], best, atol=1e-4)
            assert all(row[one.token_id] == pytest.approx(one.logprob, abs=1e-4) for one in position.top)


def test_samples_tell_of_named_tokens_and_of_all(llm: LLM, truth: Truth) -> None:
    named = SamplingParams(max_tokens=5, seed=3, logprob_token_ids=[4, 130, 77], ignore_eos=True)
    every = SamplingParams(max_tokens=5, seed=3, logprobs=-1, ignore_eos=True)
    prompts = [TokensPrompt(prompt_token_ids=PROMPTS[3])] * 2
    for output, how in zip(llm.generate(prompts, [named, every]), (named, every), strict=True):
        (one,) = output.outputs
        want = truth.logprobs([*PROMPTS[3], *one.token_ids])[len(PROMPTS[3]) - 1 :]
        assert one.logprobs is not None
        for position, row, token in zip(one.logprobs, want, one.token_ids, strict=False):
            assert position.chosen.logprob == pytest.approx(row[token], abs=1e-4)
            told = position.asked if how is named else position.top
            assert [t.token_id for t in told] == [4, 130, 77] or len(told) == VOCAB_SIZE
            assert all(row[t.token_id] == pytest.approx(t.logprob, abs=1e-4) for t in told)


def test_samples_have_the_entropy_and_their_log_probability_after_truncation(llm: LLM, truth: Truth) -> None:
    prompts = [TokensPrompt(prompt_token_ids=PROMPTS[3])] * 2
    fields: dict[str, Any] = {"max_tokens": 5, "n": 3, "ignore_eos": True}
    plain = SamplingParams(seed=3, sampling_logprobs=True, **fields)
    cut = SamplingParams(seed=4, sampling_logprobs=True, temperature=0.7, top_k=9, top_p=0.9, **fields)
    for output, how in zip(llm.generate(prompts, [plain, cut]), (plain, cut), strict=True):
        for one in output.outputs:
            want = truth.logprobs([*PROMPTS[3], *one.token_ids])[len(PROMPTS[3]) - 1 :]
            assert one.logprobs is not None and len(one.logprobs) == 5
            for position, row, token in zip(one.logprobs, want, one.token_ids, strict=False):
                assert position.entropy == pytest.approx(-(np.exp(row) * row).sum(), abs=1e-3)
                assert position.sampling_logprob is not None
                if how is plain:
                    assert position.sampling_logprob == position.chosen.logprob
                    continue
                kept = np.sort(row)[::-1][:9] / 0.7
                shares = np.exp(kept) / np.exp(kept).sum()
                kept = kept[: 1 + np.searchsorted(np.cumsum(shares), 0.9)]
                scaled = row[token] / 0.7 - np.log(np.exp(kept).sum())
                assert position.sampling_logprob == pytest.approx(scaled, abs=1e-3)


def test_continuations_are_scored_and_their_prompt_is_computed_once(llm: LLM, truth: Truth) -> None:
    prompt = random_prompts([40], seed=5)[0]
    continuations = [*random_prompts([1, 3, 7, 12, 20, 2, 2, 5], seed=6)]
    engine = engine_of(llm)
    before = engine.load()
    llm.reset_prefix_cache()
    scores = llm.score_continuations(TokensPrompt(prompt_token_ids=prompt), continuations)
    for continuation, score in zip(continuations, scores[0], strict=True):
        want = truth.logprobs([*prompt, *continuation])[len(prompt) - 1 : -1]
        assert list(score.token_ids) == continuation
        each = [row[token] for row, token in zip(want, continuation, strict=True)]
        np.testing.assert_allclose([one.logprob for one in score.tokens], each, atol=1e-4)
        assert score.logprob == pytest.approx(sum(each), abs=1e-3)
        assert score.is_greedy == all(row.argmax() == token for row, token in zip(want, continuation, strict=True))
    hits = engine.load().num_prefix_hit_tokens - before.num_prefix_hit_tokens
    assert hits >= (len(continuations) - 1) * 36 * (1 if engine.geometry.num_blocks > 100 else 0)


def test_the_likeliest_continuation_is_greedy(llm: LLM) -> None:
    prompt = TokensPrompt(prompt_token_ids=PROMPTS[2])
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    tokens = output.outputs[0].token_ids
    ((greedy, other),) = llm.score_continuations(prompt, [tokens, [*tokens[:-1], (tokens[-1] + 1) % VOCAB_SIZE]])
    assert (greedy.is_greedy, other.is_greedy) == (True, False)
    assert greedy.logprob > other.logprob


def test_a_text_goes_on_with_its_prompt_as_one_text(llm: LLM) -> None:
    (scores,) = llm.score_continuations("5,6,7,", ["8,9,", "1,"])
    assert [score.token_ids for score in scores] == [(8, 9), (1,)]
    of_many = llm.score_continuations(["5,6,7,", "3,"], [["8,9,"], ["4,", "5,"]])
    assert [[score.token_ids for score in each] for each in of_many] == [[(8, 9)], [(4,), (5,)]]
    assert of_many[0][0].logprob == pytest.approx(scores[0].logprob, abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_hidden_states(llm: LLM, truth: Truth, pooling: Any) -> None:
    embeddings = llm.embed([TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS], pooling=pooling)
    for prompt, embedding in zip(PROMPTS, embeddings, strict=True):
        hidden = truth.hidden(prompt)
        want = hidden[-1] if pooling == "last" else hidden.mean(axis=0)
        np.testing.assert_allclose(embedding.values, want, atol=2e-4)
        assert embedding.prompt_token_ids == tuple(prompt)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("continuations", "problem"),
    [
        ([], "continuations: 0 are given"),
        ([[]], r"continuations\[0\]: is empty"),
        ([""], r"continuations\[0\]: is empty"),
        ([[5], [999]], r"continuations\[1\]: 999 is not a token id"),
        ([[5] * 96], r"continuations\[0\]: with the prompt, 98 tokens are over max_model_len"),
    ],
)
def test_what_cannot_be_scored_is_refused(folder: Path, llm: LLM, continuations: list[Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        llm.score_continuations(TokensPrompt(prompt_token_ids=[3, 4]), continuations)
    with pytest.raises(InvalidArgument, match="continuations: 1 are given for 2 prompts"):
        llm.score_continuations(["5,", "6,"], [["7,"]])
    with pytest.raises(InvalidArgument, match="pooling: 'median' is not one of 'last', 'mean', 'all'"):
        llm.embed("5,", pooling="median")  # type: ignore[arg-type]
