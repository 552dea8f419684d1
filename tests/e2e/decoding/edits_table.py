"""Every field that says how tokens are chosen, crossed with every other, and the token that the oracles choose."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jpaged.types import CompletionOutput, Request, SamplingParams
from tests.device.step import edits_oracle, sampling_oracle
from tests.device.step.edits_oracle import Edits
from tests.device.step.sampling_oracle import Params
from tests.e2e.rig import EOS_TOKEN_ID, VOCAB_SIZE

FIELDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.5},
    "typical_p": {"typical_p": 0.85},
    "top_n_sigma": {"top_n_sigma": 1.5},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -0.75},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "logit_bias": {"logit_bias": {5: 4.0, 17: -100.0, 99: 3.0, 100: 2.5, 101: 2.0}},
    "allowed_token_ids": {"allowed_token_ids": [*range(2, 70)]},
    "bad_words": {"bad_words": ["33,", "8,9,", "40,41,42,", "99,"]},
    "min_tokens": {"min_tokens": 12, "ignore_eos": False},
    "stop_token_ids": {"stop_token_ids": [30, 31]},
    "logprobs": {"logprobs": 4},
    "greedy": {"temperature": 0.0},
}
PAIRS = [(a, b) for a, b in itertools.combinations(FIELDS, 2) if {a, b} != {"temperature", "greedy"}]


def params_of(names: Sequence[str], seed: int) -> SamplingParams:
    """The fields of a case together; what it leaves open ends by length alone."""
    values: dict[str, Any] = {"max_tokens": 16, "seed": seed, "ignore_eos": True, "logprobs": 0}
    for name in names:
        values |= FIELDS[name]
    return SamplingParams(**values)


def check(
    logits_tv: np.ndarray, prompt: Sequence[int], request: Request, output: CompletionOutput, *, index: int = 0
) -> None:
    """Each token is one that the oracles may choose, with the log-probability that the model gave it.

    Args:
        logits_tv: of the model after every token of prompt and output.
    """
    sampling, tokens = request.sampling, list(output.token_ids)
    for place, token in enumerate(tokens):
        logits = logits_tv[len(prompt) + place - 1].astype(np.float64)
        edits = Edits(
            history=(tuple(prompt), tuple(tokens[:place])),
            repetition=sampling.repetition_penalty,
            frequency=sampling.frequency_penalty,
            presence=sampling.presence_penalty,
            top_n_sigma=sampling.top_n_sigma,
            typical_p=sampling.typical_p,
            singles=_singles(request, [*prompt, *tokens[:place]]),
            allowed=None if sampling.allowed_token_ids is None else tuple(sampling.allowed_token_ids),
        )
        banned = sorted(sampling.ending_ids(frozenset({EOS_TOKEN_ID}))) if place < sampling.min_tokens else ()
        logits_of_rest = logits.copy()
        logits_of_rest[list(banned)] = -np.inf
        x = edits_oracle.edited(logits_of_rest, edits)
        choices = set[int]()
        for is_typical in edits_oracle.typical(x, edits, sampling.temperature):  # rounding decides between these
            choices |= _choices(np.where(is_typical, x, -np.inf), sampling, len(prompt) + place, index)
        assert token in choices, (sampling, place)
        if output.logprobs is not None:
            got = output.logprobs[place].chosen.logprob
            assert abs(got - sampling_oracle.logprobs(logits)[token]) < 1e-3


def _singles(request: Request, context: list[int]) -> tuple[tuple[int, int, float], ...]:
    biases = [(token, -1, bias) for token, bias in (request.sampling.logit_bias or {}).items()]
    ended = [word for word in request.bad_word_ids if context[len(context) - len(word) + 1 :] == list(word[:-1])]
    return (*biases, *((word[-1], -1, -np.inf) for word in ended))


def _choices(x: np.ndarray, sampling: SamplingParams, position: int, index: int) -> set[int]:
    """The tokens that rounding may decide between."""
    if sampling.is_greedy:
        return set(np.flatnonzero(x >= x.max() - 1e-3).tolist())
    how = Params(
        temperature=sampling.temperature,
        top_k=max(0, sampling.top_k),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed or 0,
        index=index,
        position=position,
    )
    with np.errstate(invalid="ignore"):
        sure, possible = sampling_oracle.kept(x / sampling.temperature, how)
    scores = x / sampling.temperature - np.log(sampling_oracle.exponentials(how, VOCAB_SIZE))
    best = scores[sure].max() if sure.any() else -np.inf
    return set(np.flatnonzero(possible & (scores >= best - 2e-3)).tolist())
