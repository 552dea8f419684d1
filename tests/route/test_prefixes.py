"""Beginnings of prompts as chains of hashes: alike as far as prompts are, never across tenants, salts or adapters."""

from itertools import pairwise, takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged._proto.v1 import control_pb2, inference_pb2
from jpaged.client import convert
from jpaged.route.prefix_table import CUTS, Chain, parse_prompt_prefix
from jpaged.types import Prompt, SamplingParams


def chain(prompt: Prompt, owner: bytes = b"", **fields: Any) -> Chain:
    sampling = SamplingParams(cache_salt=fields.pop("cache_salt", ""))
    made = parse_prompt_prefix(convert.generate_request(prompt, sampling, request_id=None, model=None, **fields), owner)
    assert made is not None
    return made.chain


def num_alike(one: Chain, other: Chain) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@given(st.integers(0, 20_000), st.integers(1, 20_000))
def test_texts_are_alike_as_far_as_they_begin_alike(num_same, num_more):
    same, more = "abcdefg" * (num_same // 7), "x" * num_more
    one, other = chain(Prompt(text=same + more)), chain(Prompt(text=same + "y" + more))
    whole = sum(cut <= len(same) for cut in CUTS)
    assert num_alike(one, other) == whole
    assert len(one) == max(1, sum(cut <= len(same + more) for cut in CUTS))


@pytest.mark.long
@given(st.integers(0, 4000), st.integers(1, 3000))
def test_token_ids_are_alike_as_far_as_they_begin_alike(num_same, num_more):
    same = tuple(range(num_same))
    one = chain(Prompt(token_ids=(*same, 7, *range(num_more))))
    other = chain(Prompt(token_ids=(*same, 8, *range(num_more))))
    assert num_alike(one, other) == sum(cut <= 4 * num_same for cut in CUTS)


def test_a_conversation_that_goes_on_has_the_chain_of_what_was_said():
    said: list[dict[str, Any]] = [{"role": "system", "content": "Be brief. " * 60}]
    chains = []
    for turn in range(5):
        said.append({"role": "user", "content": f"question {turn} " * 20})
        chains.append(chain(Prompt(messages=tuple(said))))
        said.append({"role": "assistant", "content": f"answer {turn} " * 20})
    for before, after in pairwise(chains):
        assert num_alike(before, after) == len(before) < len(after)


def test_what_shares_no_blocks_shares_no_hash():
    text = Prompt(text="the same beginning " * 100)
    others = [
        chain(text),
        chain(text, b"tenant"),
        chain(text, adapter="x"),
        chain(text, cache_salt="x"),
        chain(Prompt(token_ids=tuple(range(500)))),
        chain(Prompt(messages=({"role": "user", "content": text.text},))),
    ]
    hashes = [set(one) for one in others]
    assert len(set.union(*hashes)) == sum(len(one) for one in hashes)


@pytest.mark.parametrize("parts", [("ab", "c"), ("a", "bc"), ("", "abc")])
def test_names_that_join_alike_are_told_apart(parts):
    adapter, salt = parts
    made = chain(Prompt(text="x"), adapter=adapter, cache_salt=salt)
    assert made != chain(Prompt(text="x"), adapter="abc")


def test_a_score_has_the_chain_of_its_prompt_and_other_calls_have_none():
    score = inference_pb2.ScoreRequest(text="a prompt " * 50)
    generate = inference_pb2.GenerateRequest(text="a prompt " * 50)
    one, other = parse_prompt_prefix(score, b""), parse_prompt_prefix(generate, b"")
    assert one is not None and other is not None and one.chain == other.chain
    assert parse_prompt_prefix(control_pb2.GetLoadRequest(), b"") is None
    assert parse_prompt_prefix(inference_pb2.GenerateRequest(), b"") is None


def test_a_long_prompt_costs_no_more_than_a_bound():
    assert len(chain(Prompt(text="x" * 900_000))) == len(CUTS) == 103
    assert chain(Prompt(text="x" * 900_000)) == chain(Prompt(text="x" * 500_000))
