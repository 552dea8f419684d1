"""Speculation changes no token of the demo model, for requests of every mix, with and without grammars."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged.checkpoints.hub import find_folder
from jpaged.engine.speculative.draft_model import DraftModelSpeculation
from jpaged.engine.speculative.drafter import SpecDecodeController
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.llm import LLM, TokensPrompt
from jpaged.structured import StructuredOutputs
from jpaged.types import RequestOutput, SamplingParams
from tests.e2e.rig import engine_of, open_llm
from tests.engine.proposing import Always, InTurn
from tests.models.eagle_heads import HeadSizes, finding_head, random_head, write
from tests.models.tiny import tiny_case, write_checkpoint
from tests.service.structured_output.schemas import random_schema, with_definitions

VOCAB_SIZE = 3072
SIZES = {"max_num_seqs": 32, "max_num_batched_tokens": 64, "max_model_len": 256, "num_blocks": 160, "block_size": 8}
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix", "num_speculative_tokens": 6},
}
WAYS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "few blocks": {"num_blocks": 40, "max_num_seqs": 16},
    "swapped": {"num_blocks": 40, "max_num_seqs": 16, "swap_space": 1.0, "preemption_mode": "swap"},
    "two devices": {"tensor_parallel_size": 2},
    "contexts in parts": {"context_parallel_size": 2},
}
DRAFTS = ("the model itself", "random")
"""Draft models: one that is always right, and one that knows nothing."""
NUMS_ROUNDS = 3, 0, 16, 1
FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"presence_penalty": 0.7},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.2},
    {"logit_bias": {300: 4.0, 12: -50.0}},
    {"allowed_token_ids": list(range(0, VOCAB_SIZE, 3))},
    {"bad_words": ["the", " and then"]},
    {"min_tokens": 6},
    {"stop": ["the", "."], "include_stop_str_in_output": True},
    {"stop_token_ids": list(range(200, 230))},
    {"logprobs": 3},
    {"logprobs": -1},
    {"prompt_logprobs": 1},
    {"logprob_token_ids": [7, 9]},
    {"top_n_sigma": 1.0},
    {"typical_p": 0.7},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.01},
    {"n": 3},
    {"best_of": 3},
)


def a_request(rng: random.Random) -> tuple[list[int], SamplingParams]:
    """A prompt in which something comes twice, and any two fields; every third has a grammar, every ninth beams."""
    phrase = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 9))]
    prompt = [rng.randrange(3, VOCAB_SIZE), *phrase, *phrase, *phrase[: rng.randrange(1, 9)]]
    fields: dict[str, Any] = {"max_tokens": rng.randrange(1, 40), "temperature": rng.choice([0.0, 0.2, 0.9])}
    if rng.random() < 0.1:
        width = rng.randrange(1, 4)
        return prompt, SamplingParams(beam_width=width, n=width, max_tokens=8, temperature=0.0)
    fields |= {"seed": rng.randrange(1 << 60)} | rng.choice(FIELDS) | rng.choice(FIELDS)
    if fields["temperature"] == 0.0 and {"n", "best_of"} & fields.keys():
        fields["temperature"] = 0.9
    if fields.get("best_of") and fields.get("n"):
        del fields["n"]
    if "logprob_token_ids" in fields:
        fields.pop("logprobs", None)
    fields["max_tokens"] = max(fields["max_tokens"], fields.get("min_tokens", 0))
    if rng.random() < 0.35 and not {"allowed_token_ids", "bad_words", "stop", "stop_token_ids"} & fields.keys():
        fields["structured_outputs"] = outputs = a_grammar(rng)
        if outputs.always_complete:
            fields = {name: value for name, value in fields.items() if name not in ("n", "best_of")}
            fields["max_tokens"] = 160
    return prompt, SamplingParams(**fields)


def a_grammar(rng: random.Random) -> StructuredOutputs:
    kind = rng.randrange(4)
    if kind == 0:
        return StructuredOutputs(choice=["yes", "no", "perhaps not today"])
    if kind == 1:
        return StructuredOutputs(regex="(a|b|the cat )+[0-9]{2,5}")
    return StructuredOutputs(json=with_definitions(random_schema(rng.randrange(1000))), always_complete=kind == 2)


@contextmanager
def speculating(method: str, way: str) -> Iterator[tuple[LLM, Always]]:
    """An engine that runs whatever its proposer has, whether or not that pays."""
    options = METHODS[method]
    with open_llm("demo", **SIZES | WAYS[way], max_logprobs=-1, speculative_config=options) as llm:
        always = Always(options["num_speculative_tokens"])
        drafting = engine_of(llm)._loop._drafter
        assert isinstance(drafting, SpecDecodeController)
        drafting._adaptation = always
        yield llm, always


def generate(llm: LLM, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    prompts, params = zip(*requests, strict=True)
    return llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], list(params))


def assert_same(got: Sequence[RequestOutput], want: Sequence[RequestOutput]) -> None:
    """The same tokens, texts and ends; log-probabilities that differ by rounding alone."""
    for place, (a, b) in enumerate(zip(got, want, strict=True)):
        for mine, other in zip(a.outputs, b.outputs, strict=True):
            assert (mine.token_ids, mine.text) == (other.token_ids, other.text), place
            assert (mine.finish_reason, mine.matched_stop) == (other.finish_reason, other.matched_stop), place
            values = [
                [value.logprob for one in each.logprobs or () for value in (one.chosen, *one.top, *one.asked)]
                for each in (mine, other)
            ]
            np.testing.assert_allclose(values[0], values[1], rtol=0, atol=1e-4)
            sums = [each.cumulative_logprob or 0.0 for each in (mine, other)]
            assert sums[0] == pytest.approx(sums[1], abs=1e-3)


def check(method: str, way: str, seeds: range) -> None:
    requests = [a_request(random.Random(seed)) for seed in seeds]
    with open_llm("demo", **SIZES, max_logprobs=-1) as llm:
        want = generate(llm, requests)
    with speculating(method, way) as (llm, always):
        assert_same(generate(llm, requests), want)
        num_accepted = always.num_accepted
        assert_same(generate(llm, requests), want)
        assert always.num_accepted > num_accepted  # what was seen once is proposed, too
        load = llm.load().speculation
        assert load.num_accepted_tokens == always.num_accepted
        assert llm.load().num_preemptions > 0 or "num_blocks" not in WAYS[way]


@pytest.mark.long
@pytest.mark.parametrize(("method", "way"), [("suffix", "as it comes"), ("ngram", "few blocks")])
@pytest.mark.thinned(2)
def test_some_requests_of_every_mix_have_the_same_tokens(method: str, way: str) -> None:
    check(method, way, range(60))


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", WAYS)
def test_a_thousand_requests_of_every_mix_have_the_same_tokens(method: str, way: str) -> None:
    check(method, way, range(1000) if way == "as it comes" else range(1000, 1100))


def draft_config(draft: str, folder: Path) -> dict[str, Any]:
    if draft == "random":
        case = tiny_case("llama_mha")
        config = {**case.config, "vocab_size": VOCAB_SIZE, "max_position_embeddings": SIZES["max_model_len"]}
        write_checkpoint(dataclasses.replace(case, config=config), folder)
    model = str(folder) if draft == "random" else "demo"
    return {"method": "draft_model", "model": model, "num_speculative_tokens": 3}


def has_rounds(params: SamplingParams) -> bool:
    """Whether a request's rows may go on by rounds of a draft model."""
    return not (
        params.needs_row_scheduling
        or params.structured_outputs
        or params.needs_counts
        or params.needs_logprobs
        or params.prompt_logprobs is not None
    )


def check_draft(draft: str, way: str, seeds: range, folder: Path) -> None:
    """A few requests at a time, of every mix, and of those alone that have rounds: where all rows do there are some."""
    requests = [a_request(random.Random(seed)) for seed in seeds]
    alone = [one for one in requests if has_rounds(one[1])]
    size = 24 if "num_blocks" in WAYS[way] else 4
    parts = [some[begin : begin + size] for some in (requests, alone) for begin in range(0, len(some), size)]
    with open_llm("demo", **SIZES, max_logprobs=-1) as llm:
        want = [generate(llm, part) for part in parts]
    with open_llm("demo", **SIZES | WAYS[way], max_logprobs=-1, speculative_config=draft_config(draft, folder)) as llm:
        rounds = engine_of(llm)._loop._drafter
        assert isinstance(rounds, DraftModelSpeculation)
        rounds._rule = rule = InTurn(*NUMS_ROUNDS)
        for part, expected in zip(parts, want, strict=True):
            assert_same(generate(llm, part), expected)
        load = llm.load()
        assert rule.num_dispatches > 0
        share = load.speculation.num_accepted_tokens / load.speculation.num_draft_tokens
        assert share > 0.5 if draft == "the model itself" else share < 0.5
        assert load.num_preemptions > 0 or "num_blocks" not in WAYS[way]


@pytest.mark.parametrize(("draft", "way"), [("the model itself", "as it comes"), ("random", "swapped")])
@pytest.mark.long
def test_some_requests_have_the_same_tokens_with_a_draft_model(draft: str, way: str, tmp_path: Path) -> None:
    check_draft(draft, way, range(60), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("way", WAYS)
def test_many_requests_have_the_same_tokens_with_a_draft_model(draft: str, way: str, tmp_path: Path) -> None:
    few = range(1000, 1040)
    seeds = {"as it comes": range(1000), "two devices": few, "contexts in parts": few}.get(way, range(1000, 1100))
    check_draft(draft, way, seeds, tmp_path)


@pytest.mark.long
def test_every_copy_of_a_model_has_its_draft() -> None:
    requests = [
        (prompt, params) for prompt, params in map(a_request, map(random.Random, range(40))) if has_rounds(params)
    ]
    with open_llm("demo", **SIZES) as llm:
        want = generate(llm, requests)
    config = {"method": "draft_model", "model": "demo", "num_speculative_tokens": 2}
    with open_llm("demo", **SIZES, data_parallel_size=2, speculative_config=config) as llm:
        for _ in range(20):  # the first steps of each copy are plain, and of each number of rows
            assert_same(generate(llm, requests), want)
            if num_accepted := llm.load().speculation.num_accepted_tokens:
                break
        assert num_accepted > 0


@pytest.mark.long
def test_a_draft_model_that_the_first_proposals_come_from_has_seen_what_plain_steps_ran() -> None:
    """Proposals are as good behind plain steps as if there had been none."""
    config = {"method": "draft_model", "model": "demo", "num_speculative_tokens": 3}
    request = TokensPrompt(prompt_token_ids=[3, 70, 9]), SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    shares = []
    with open_llm("demo", **SIZES, speculative_config=config) as llm:
        rounds = engine_of(llm)._loop._drafter
        assert isinstance(rounds, DraftModelSpeculation)
        for nums_rounds in ((4,), (0, 1)):
            rounds._rule = InTurn(*nums_rounds)
            before = llm.load().speculation
            llm.generate(*request)
            after = llm.load().speculation
            num_proposed = after.num_draft_tokens - before.num_draft_tokens
            shares.append((after.num_accepted_tokens - before.num_accepted_tokens) / num_proposed)
    assert min(shares) > 0.9


def test_a_draft_model_that_does_not_go_with_the_model_is_refused_by_name(tmp_path: Path) -> None:
    case = tiny_case("llama_mha")
    write_checkpoint(case, tmp_path / "small")
    config = {**case.config, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 64}
    write_checkpoint(dataclasses.replace(case, config=config), tmp_path / "short")
    shutil.copytree(find_folder("demo"), tmp_path / "other")
    tokens = json.loads((tmp_path / "other" / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokens["model"]["vocab"]
    first, second = [name for name in vocab if len(name) > 5][:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokens), encoding="utf-8")
    problems = {
        "small": "vocabulary has 131 tokens",
        "short": "limit is 64 tokens",
        "other": "of the draft, but .* of the model",
        "nothing": "nothing",
    }
    for name, problem in problems.items():
        config = {"method": "draft_model", "model": str(tmp_path / name), "num_speculative_tokens": 3}
        with (
            pytest.raises(InvalidArgument, match=problem) as raised,
            open_llm("demo", **SIZES, speculative_config=config),
        ):
            raise AssertionError(f"{name} is served")
        assert raised.value.field == "speculative_config.model"


HEADS = ("sometimes right", "random")
HEAD_WAYS = ("as it comes", "few blocks")
HEAD_SIZES = HeadSizes(
    VOCAB_SIZE, hidden_size=256, inner=96, num_heads=16, num_kv_heads=8, head_dim=32, target_hidden_size=256
)


def head_config(head: str, want: Sequence[Sequence[RequestOutput]], folder: Path) -> dict[str, Any]:
    """A head for the demo: one that knows nothing, or one that proposes what most often follows in these outputs.

    The first takes the demo's embedding.
    """
    if head == "random":
        tensors = random_head(HEAD_SIZES, 1000)
        del tensors["embed_tokens.weight"]
    else:
        width = HEAD_SIZES.hidden_size
        embedding, output = np.random.default_rng(7).normal(size=(VOCAB_SIZE, width)), np.zeros((VOCAB_SIZE, width))
        texts = (one.token_ids for part in want for outputs in part for one in outputs.outputs)
        pairs = Counter(pair for text in texts for pair in itertools.pairwise(text))
        for before, after in {pair[0]: pair[1] for pair, _ in reversed(pairs.most_common())}.items():
            output[after] += embedding[before]
        tensors = finding_head(HEAD_SIZES, embedding, output)
    config = HEAD_SIZES.config(draft_vocab_size=len(tensors["lm_head.weight"]))
    return {"method": "eagle3", "model": str(write(folder, config, tensors)), "num_speculative_tokens": 3}


def check_head(head: str, way: str, seeds: range, folder: Path) -> None:
    """As `check_draft`."""
    requests = [a_request(random.Random(seed)) for seed in seeds]
    alone = [one for one in requests if has_rounds(one[1])]
    size = 24 if "num_blocks" in WAYS[way] else 4
    parts = [some[begin : begin + size] for some in (requests, alone) for begin in range(0, len(some), size)]
    with open_llm("demo", **SIZES, max_logprobs=-1) as llm:
        want = [generate(llm, part) for part in parts]
    config = head_config(head, want, folder)
    with open_llm("demo", **SIZES | WAYS[way], max_logprobs=-1, speculative_config=config) as llm:
        rounds = engine_of(llm)._loop._drafter
        assert isinstance(rounds, DraftModelSpeculation)
        rounds._rule = rule = InTurn(*NUMS_ROUNDS)
        for part, expected in zip(parts, want, strict=True):
            assert_same(generate(llm, part), expected)
        load = llm.load()
        assert rule.num_dispatches > 0
        share = load.speculation.num_accepted_tokens / load.speculation.num_draft_tokens
        assert share > 0.01 if head == "sometimes right" else share < 0.005, share
        assert load.num_preemptions > 0 or "num_blocks" not in WAYS[way]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.long
def test_some_requests_have_the_same_tokens_with_a_head(head: str, tmp_path: Path) -> None:
    check_head(head, "few blocks" if head == "random" else "as it comes", range(60), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("way", HEAD_WAYS)
def test_many_requests_have_the_same_tokens_with_a_head(head: str, way: str, tmp_path: Path) -> None:
    check_head(head, way, range(1000) if way == "as it comes" else range(1000, 1100), tmp_path)


@pytest.mark.long
def test_a_head_is_right_as_often_behind_plain_steps_and_in_every_copy(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    requests = [([first, 70, 9], params) for first in range(3, 11)]
    with open_llm("demo", **SIZES) as llm:
        want = generate(llm, requests)
    config, shares = head_config("sometimes right", [want], tmp_path), []
    with open_llm("demo", **SIZES, data_parallel_size=2, speculative_config=config) as llm:
        for _ in range(20):  # the first steps of each copy are plain, and of each number of rows
            assert_same(generate(llm, requests), want)
            if num_accepted := llm.load().speculation.num_accepted_tokens:
                break
        assert num_accepted > 0
    with open_llm("demo", **SIZES, speculative_config=config) as llm:
        rounds = engine_of(llm)._loop._drafter
        assert isinstance(rounds, DraftModelSpeculation)
        for nums_rounds in ((4,), (0, 1)):
            rounds._rule = InTurn(*nums_rounds)
            before = llm.load().speculation
            for request, expected in zip(requests, want, strict=True):
                assert_same(generate(llm, [request]), [expected])
            after = llm.load().speculation
            num_proposed = after.num_draft_tokens - before.num_draft_tokens
            shares.append((after.num_accepted_tokens - before.num_accepted_tokens) / num_proposed)
    assert min(shares) > 0.8 * max(shares) > 0.1, shares


def test_a_head_that_cannot_be_loaded_is_refused_by_name(tmp_path: Path) -> None:
    tensors = random_head(HEAD_SIZES, 1000)
    fits = HEAD_SIZES.config(draft_vocab_size=1000)
    write(tmp_path / "narrow", {**fits, "target_hidden_size": 128}, {**tensors, "fc.weight": np.zeros((256, 384))})
    fewer = dataclasses.replace(HEAD_SIZES, vocab_size=3000)
    write(tmp_path / "fewer", fewer.config(draft_vocab_size=1000), random_head(fewer, 1000))
    write(tmp_path / "lacks", fits, {name: each for name, each in tensors.items() if name != "fc.weight"})
    write(tmp_path / "pickled", fits, {}).joinpath("model.safetensors").rename(tmp_path / "pickled" / "weights.bin")
    problems = {
        "narrow": "hidden states of size 128, but the model's have size 256",
        "fewer": "vocabulary has 3000 tokens and the model's has 3072",
        "lacks": "tensor fc.weight .* is missing",
        "pickled": "only safetensors weights are supported",
        "nothing": "does not exist",
        "demo": "only EAGLE-3 heads with 1 layer",
    }
    for name, problem in problems.items():
        model = name if name == "demo" else str(tmp_path / name)
        config = {"method": "eagle3", "model": model, "num_speculative_tokens": 3}
        with (
            pytest.raises((InvalidArgument, Unsupported), match=rf"speculative_config.model: (?s:.*){problem}"),
            open_llm("demo", **SIZES, speculative_config=config),
        ):
            raise AssertionError(f"{name} is served")
