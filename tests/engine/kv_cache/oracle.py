"""What a request gives over the fake executor, computed on plain lists: no blocks, no steps, no company."""

from __future__ import annotations

from jpaged.engine.output.beam import BeamSearch
from jpaged.testing import expected_tokens, top_logprobs
from jpaged.types import PositionLogprobs, SamplingParams, TokenLogprob


def expected_outputs(
    prompt, sampling: SamplingParams, eos_token_ids=frozenset(), vocab_size=257, windows=(None,), weight=0
):
    """The token ids of every sequence that a request returns, by index."""
    if sampling.beam_width:
        return expected_beams(prompt, sampling, eos_token_ids, vocab_size, windows, weight)
    seed, ending = None if sampling.is_greedy else sampling.seed, sampling.ending_ids(eos_token_ids)
    samples = [
        expected_tokens(
            prompt,
            sampling.max_num_tokens,
            vocab_size=vocab_size,
            seed=seed,
            sequence_index=i,
            eos_token_ids=ending,
            windows=windows,
            weight=weight,
        )
        for i in range(sampling.num_samples)
    ]
    if sampling.num_samples == sampling.n:
        return samples
    # Every token is as likely as every other: the shortest are the likeliest, and of equals the first.
    return sorted(samples, key=len)[: sampling.n]


def expected_beams(
    prompt, sampling: SamplingParams, eos_token_ids=frozenset(), vocab_size=257, windows=(None,), weight=0
):
    search = BeamSearch(sampling, sampling.ending_ids(eos_token_ids))
    while not search.is_done:
        contexts = [[*prompt, *beam.token_ids] for beam in search.beams]
        tops = [_top(context, search.num_candidates, vocab_size, windows, weight) for context in contexts]
        search.advance(tops)
    return [list(beam.token_ids) for beam in search.best(sampling.n)]


def _top(context, count, vocab_size, windows, weight):
    (token_id,) = expected_tokens(context, 1, vocab_size=vocab_size, windows=windows, weight=weight)
    pairs = top_logprobs(token_id, vocab_size)[:count]
    return [PositionLogprobs(TokenLogprob(i, logprob)) for i, logprob in pairs]
