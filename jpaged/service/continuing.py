"""Requests that resume after tokens generated on another server: checked, and brought to the same state.

    given tokens ──> text, stops ──> `Continued.text`    text held back at the seam
                └─> grammar     ──> `Continued.grammar`
                └─> ChatAnswers     parses the emitted text without emitting it again

All state is rebuilt from the tokens, so that nothing else has to be sent. The cost grows with the number of tokens, so
the work runs on a thread.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jpaged.engine.output.processor import OutputState
from jpaged.engine.output.text import RememberedTexts
from jpaged.engine.tokenizer import NoTokenizer, Tokenizer
from jpaged.errors import InvalidArgument
from jpaged.types import Continued, Generated, Request, SamplingParams

FIELD = "generated_token_ids"


def check_generated(generated: Sequence[Generated], sampling: SamplingParams) -> None:
    """Reject, before reading the tokens, generated sequences that a request of these parameters cannot resume from.

    Raises:
        InvalidArgument: names the field, and the limit.
    """
    if not generated:
        return
    if sampling.beam_width or sampling.num_samples > sampling.n:
        name = "beam_width" if sampling.beam_width else "best_of"
        raise InvalidArgument(FIELD, f"must be left out with sampling.{name}: such a request cannot be resumed")
    if sampling.seed is None and not sampling.is_greedy:
        raise InvalidArgument("sampling.seed", f"must be set with {FIELD}: the first response returned the seed")
    if len(generated) > sampling.n:
        raise InvalidArgument(FIELD, f"{len(generated)} sequences are over sampling.n ({sampling.n})")
    seen = set[int]()
    for place, one in enumerate(generated):
        _check_one(f"{FIELD}[{place}]", one, sampling)
        if one.index in seen:
            raise InvalidArgument(f"{FIELD}[{place}].index", f"{one.index} is given twice")
        seen.add(one.index)
    if sum(one.has_finished for one in generated) == sampling.n:
        raise InvalidArgument(FIELD, f"all {sampling.n} sequences have finished: nothing is left to generate")


def _check_one(field: str, one: Generated, sampling: SamplingParams) -> None:
    if not 0 <= one.index < sampling.n:
        raise InvalidArgument(f"{field}.index", f"{one.index} is not from 0 to {sampling.n - 1}")
    if not math.isfinite(one.cumulative_logprob) or one.cumulative_logprob > 0:
        raise InvalidArgument(f"{field}.cumulative_logprob", f"{one.cumulative_logprob} is not a number up to 0")
    most = sampling.max_tokens - (not one.has_finished)
    if not 1 <= len(one.token_ids) <= most:
        what = "" if one.has_finished else ", at which it would have finished"
        raise InvalidArgument(
            f"{field}.ids",
            f"{len(one.token_ids)} tokens are not from 1 to {most}: max_tokens is {sampling.max_tokens}{what}",
        )


def continue_request(
    request: Request, generated: Sequence[Generated], tokenizer: Tokenizer, eos_token_ids: frozenset[int]
) -> Request:
    """Return the request with its sequences resumed after their tokens; grammars are moved by `move_grammars`.

    Raises:
        InvalidArgument: one of the tokens would have ended its sequence.
    """
    texts = None if isinstance(tokenizer, NoTokenizer) else RememberedTexts(tokenizer)
    continued = []
    for place, one in enumerate(generated):
        if one.has_finished:
            continued.append(Continued(one))
            continue
        state, shown = OutputState(texts, request.prompt_token_ids, request.sampling, eos_token_ids), list[str]()
        for number, token_id in enumerate(one.token_ids, start=1):
            text, finish = state.push(token_id)
            if finish is not None:
                problem = f"token {number}, {token_id}, ends the sequence ({finish.reason.value}): set `finished`"
                raise InvalidArgument(f"{FIELD}[{place}].ids", problem)
            shown.append(text)
        continued.append(Continued(one, "".join(shown), state.text))
    return dataclasses.replace(request, continued=tuple(continued), told_from=None)


def move_grammars(request: Request) -> Request:
    """Return the request with each sequence's grammar advanced over its tokens.

    Raises:
        InvalidArgument: a grammar does not allow them.
    """
    if request.grammar is None:
        return request
    moved, outputs = [], request.sampling.structured_outputs
    for place, one in enumerate(request.continued):
        if one.generated.has_finished:
            moved.append(one)
            continue
        state = request.grammar.start()
        if outputs is not None and outputs.always_complete:
            state.closing(request.sampling.max_tokens)
        for number, token_id in enumerate(one.generated.token_ids, start=1):
            if not state.accept(token_id):
                problem = f"token {number}, {token_id}, is not allowed there by the grammar of this request"
                raise InvalidArgument(f"{FIELD}[{place}].ids", problem)
        moved.append(dataclasses.replace(one, grammar=state))
    return dataclasses.replace(request, continued=tuple(moved))
