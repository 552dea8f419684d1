"""What tasks say of generated texts becomes sampling, and texts are cut where the task says."""

from __future__ import annotations

from typing import Any

import pytest

from jpaged.errors import InvalidArgument
from jpaged.evaluation.runner import cut, parse_generation_params, seeded
from jpaged.sampling_params import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS
from jpaged.types import SamplingParams


def of(asked: dict[str, Any], *, eos_token_id: int | None = 7, is_thinking: bool = False) -> SamplingParams:
    return parse_generation_params(asked, max_tokens=256, eos_token_id=eos_token_id, is_thinking=is_thinking).sampling


@pytest.mark.parametrize(
    ("asked", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.5}, 0.5),
        ({"do_sample": True, "temperature": 0}, 0.0),
        ({"do_sample": None, "temperature": None}, 0.0),
    ],
)
def test_temperatures(asked: dict[str, Any], temperature: float) -> None:
    assert of(asked).temperature == temperature


@pytest.mark.parametrize(
    ("asked", "max_tokens"),
    [
        ({}, 256),
        ({"max_gen_toks": 9}, 9),
        ({"max_new_tokens": "12"}, 12),
        ({"max_tokens": 3, "max_gen_toks": 8}, 8),
        ({"max_completion_tokens": 5}, 5),
    ],
)
def test_how_many_tokens(asked: dict[str, Any], max_tokens: int) -> None:
    assert of(asked).max_tokens == max_tokens


def test_texts_that_end_a_text_are_gathered() -> None:
    generation = parse_generation_params({"until": "\n\n", "stop": ["Q:", "", "\n\n"]}, max_tokens=8, eos_token_id=7)
    assert generation.until == ("\n\n", "Q:")
    assert generation.sampling.stop == ("\n\n", "Q:")
    assert generation.sampling.stop_token_ids == (7,)
    assert generation.sampling.detokenize
    assert not generation.sampling.skip_special_tokens


def test_what_the_engine_takes_no_more_of_is_cut_afterwards() -> None:
    texts = [*(f"end {n}" for n in range(MAX_STOP_STRINGS + 2)), "x" * (MAX_STOP_STRING_CHARS + 1)]
    generation = parse_generation_params({"until": texts}, max_tokens=8, eos_token_id=None)
    assert generation.until == tuple(texts)
    assert generation.sampling.stop == tuple(texts[:MAX_STOP_STRINGS])


def test_a_model_that_thinks_is_ended_by_tokens_alone() -> None:
    sampling = of({"until": ["\n\n"]}, is_thinking=True)
    assert (sampling.stop, sampling.detokenize, sampling.stop_token_ids) == ((), False, (7,))


def test_beams_and_other_fields_go_on_under_their_names() -> None:
    beams = of({"num_beams": 3, "until": ["."]})
    assert (beams.beam_width, beams.stop) == (3, ())
    assert of({"num_beams": 1}).beam_width is None
    sampling = of({"do_sample": True, "top_p": 0.9, "top_k": 40, "min_new_tokens": 2, "stop_token_ids": [3]})
    assert (sampling.top_p, sampling.top_k, sampling.min_tokens) == (0.9, 40, 2)
    assert sampling.stop_token_ids == (3, 7)
    assert of({"ignore_eos": True}).stop_token_ids == ()


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"top_q": 1}, "gen_kwargs.top_q"),
        ({"n": 2}, "gen_kwargs.n"),
        ({"until": 3}, "gen_kwargs.until"),
        ({"stop": [3]}, "gen_kwargs.stop"),
        ({"temperature": "hot"}, "gen_kwargs.temperature"),
        ({"top_p": 2.0}, "top_p"),
    ],
)
def test_what_is_not_understood_is_named(asked: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        of(asked)
    assert raised.value.field == field


def test_seeds_are_those_of_a_run_and_a_place() -> None:
    sampled = SamplingParams(temperature=1.0)
    seeds = [seeded(sampled, seed, place).seed for seed in (0, 1) for place in (0, 1)]
    assert len(set(seeds)) == 4
    assert seeds[0] == seeded(sampled, 0, 0).seed
    own = SamplingParams(temperature=1.0, seed=1)
    assert seeded(own, 0, 1).seed == seeds[3]
    assert seeded(SamplingParams(temperature=0.0), 0, 0).seed is None


@pytest.mark.parametrize(
    ("until", "text"),
    [((), " a. b\n\nc"), ((".",), " a"), (("\n\n", "."), " a"), (("d",), " a. b\n\nc"), ((" ",), "")],
)
def test_texts_are_cut(until: tuple[str, ...], text: str) -> None:
    assert cut(" a. b\n\nc", until) == text
