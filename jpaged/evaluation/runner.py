"""Runner of the harness's requests, independent of the harness: log-probabilities of pairs, and generated texts.

pairs     -> fitted to the model's length -> grouped by context -> one call per group -> a likelihood per pair
contexts  -> fitted, with the task's sampling                   -> one call each      -> a text, cut at its end
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.errors import InternalError, InvalidArgument
from jpaged.evaluation.backends import Backend
from jpaged.evaluation.generation import Generation, cut, generation_of, seeded
from jpaged.evaluation.options import EvaluationOptions
from jpaged.evaluation.pairs import Group, Likelihood, Pair, TokenIds, by_pair, fitted, grouped
from jpaged.evaluation.texts import Texts
from jpaged.progress_bar import MakeBar
from jpaged.types import RequestOutput, SamplingParams

_UNREAD_TOKENS = 2
"""A score needs one slot after the text, for a token that is dropped, and the last token of the text is not read."""


class Runner:
    """Runner of the harness's requests on a backend.

    Attributes:
        max_length: maximum number of tokens that the model reads for a score.

    Raises:
        InvalidArgument: the model has no room for the requested `max_length`.
    """

    def __init__(self, backend: Backend, texts: Texts, options: EvaluationOptions) -> None:
        room = backend.max_model_len - _UNREAD_TOKENS
        if not 1 <= (options.max_length or room) <= room:
            raise InvalidArgument(
                "max_length", f"{options.max_length} is not from 1 to {room}: max_model_len is {backend.max_model_len}"
            )
        self.max_length = options.max_length or room
        self._max_total = options.max_length or backend.max_model_len
        self._backend, self._texts, self._options = backend, texts, options
        self._num_generated = 0
        end = options.think_end_token
        self._think_end = self._texts.id_of(end) if isinstance(end, str) and self._texts.id_of(end) is not None else end

    def loglikelihoods(self, pairs: Sequence[Pair], *, use_tqdm: bool | MakeBar = False) -> list[Likelihood]:
        """Return the likelihood of the second half of each pair after the first; an empty one is certain.

        Contexts that do not fit are cut at the beginning. Duplicates are computed once.

        Raises:
            InvalidArgument: a continuation alone is longer than `max_length`, or a context is empty.
        """
        fits = [fitted(pair, self.max_length) for pair in pairs]
        groups = grouped(fits)
        of_tokens = [group for group in groups if group.is_of_tokens]
        others = [group for group in groups if not group.is_of_tokens]
        found: dict[Pair, Likelihood] = {}
        if of_tokens:
            found |= by_pair(of_tokens, self._next_tokens(of_tokens, use_tqdm))
        if others:
            found |= by_pair(others, self._backend.score(others, use_tqdm))
        return [found[fit] if fit[1] else (0.0, True) for fit in fits]

    def generate(self, asks: Sequence[tuple[str, Mapping[str, Any]]], *, use_tqdm: bool | MakeBar = False) -> list[str]:
        """Generate a text after each context, by its generation_kwargs.

        Raises:
            InvalidArgument: a key is unknown, a value out of range, or the tokens to generate leave no room for the
            context.
        """
        generations = [self._generation(asked) for _, asked in asks]
        prompts = [self._prompt(context, one) for (context, _), one in zip(asks, generations, strict=True)]
        first = self._num_generated
        self._num_generated += len(asks)
        sampling = [seeded(one.sampling, self._options.seed, first + i) for i, one in enumerate(generations)]
        outputs = self._backend.complete(prompts, sampling, use_tqdm)
        return [self._answer(output, one.until) for output, one in zip(outputs, generations, strict=True)]

    def _next_tokens(self, groups: Sequence[Group], use_tqdm: bool | MakeBar) -> list[list[Likelihood]]:
        sampling = [
            SamplingParams(
                max_tokens=1,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                logprob_token_ids=[token_id for (token_id,) in group.continuations],
            )
            for group in groups
        ]
        outputs = self._backend.complete([group.context for group in groups], sampling, use_tqdm)
        return [_told(output) for output in outputs]

    def _generation(self, asked: Mapping[str, Any]) -> Generation:
        return generation_of(
            asked,
            max_tokens=self._options.max_gen_toks,
            eos_token_id=self._texts.eos_token_id,
            is_thinking=self._think_end is not None,
        )

    def _prompt(self, context: str, generation: Generation) -> TokenIds:
        num_left = self._max_total - generation.sampling.max_tokens
        if num_left < 1:
            what = (
                f"{generation.sampling.max_tokens} tokens to generate leave none of {self._max_total} for the context"
            )
            raise InvalidArgument("max_gen_toks", what)
        return tuple(self._texts.encode(context)[-num_left:]) or (self._texts.prefix_token_id,)

    def _answer(self, output: RequestOutput, until: Sequence[str]) -> str:
        """Return the generated text, from the end of the thinking to the first end text."""
        token_ids, end = list(output.outputs[0].token_ids), self._think_end
        if isinstance(end, int) and end in token_ids:
            token_ids = token_ids[len(token_ids) - token_ids[::-1].index(end) :]
        text = self._texts.decode(token_ids)
        if isinstance(end, str):
            text = text.rpartition(end)[2]
        return cut(text if end is None else text.lstrip(), until)


def _told(output: RequestOutput) -> list[Likelihood]:
    """Return the likelihoods of the requested tokens after a prompt."""
    (sequence,) = output.outputs
    if not sequence.logprobs:
        raise InternalError(f"request {output.request_id!r} has no log-probabilities of the tokens that it named")
    position = sequence.logprobs[0]
    return [(one.logprob, one.token_id == position.chosen.token_id) for one in position.asked]
