"""What a request gives over the fake executor, computed on plain lists: no blocks, no steps, no company."""

from __future__ import annotations

from jpaged.engine.beam import BeamRules, BeamSearch
from jpaged.testing import alternatives, expected_tokens
from jpaged.types import PositionLogprobs, SamplingParams, TokenLogprob


def expected_outputs(prompt, sampling: SamplingParams, eos_token_ids=frozenset()):
    """The token ids of every sequence of a request, by index."""
    if sampling.beam_width:
        return expected_beams(prompt, sampling, eos_token_ids)
    seed = None if sampling.is_greedy else sampling.seed
    return [
        expected_tokens(prompt, sampling.max_tokens, seed=seed, sequence_index=i, eos_token_ids=eos_token_ids)
        for i in range(sampling.num_samples)
    ]


def expected_beams(prompt, sampling: SamplingParams, eos_token_ids=frozenset()):
    rules = BeamRules(
        width=sampling.beam_width or 0,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ending_ids=sampling.ending_ids(eos_token_ids),
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
    )
    search = BeamSearch(rules)
    while not search.is_done:
        search.advance([_top([*prompt, *beam.token_ids], rules.num_candidates) for beam in search.beams])
    return [list(hypothesis.token_ids) for hypothesis in search.best(sampling.n)]


def _top(context, count):
    (token_id,) = expected_tokens(context, 1)
    return [PositionLogprobs(TokenLogprob(i, logprob)) for i, logprob in alternatives(token_id)[:count]]
