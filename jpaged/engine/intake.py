"""What a caller sends -> a `Request` that can run: tokenised, bounded, its seed settled. Bad input is refused here.

After this nothing about a request is checked again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence

from jpaged.engine.beam import num_candidates
from jpaged.engine.executor import FORBIDDEN_WIDTH, TOP_WIDTH, Geometry
from jpaged.engine.tokenizer import NoTokenizer, Tokenizer
from jpaged.errors import InternalError, InvalidArgument, RequestTooLong
from jpaged.types import MAX_STOP_TOKEN_IDS, Request, SamplingParams

_MAX_EOS_TOKEN_IDS = FORBIDDEN_WIDTH - MAX_STOP_TOKEN_IDS


class Intake:
    """Makes requests for one model. Safe to call from several threads.

    Args:
        eos_token_ids: every token that ends a sequence of this model.
        seed: where a request that brings none gets its own: the n-th request of a run always gets the same.
    """

    def __init__(
        self, tokenizer: Tokenizer, geometry: Geometry, *, eos_token_ids: frozenset[int] = frozenset(), seed: int = 0
    ) -> None:
        if len(eos_token_ids) > _MAX_EOS_TOKEN_IDS:
            raise InternalError(f"{len(eos_token_ids)} end-of-sequence tokens; at most {_MAX_EOS_TOKEN_IDS} are held")
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self._geometry = geometry
        self._seed = seed
        self._counter = itertools.count()

    def make_request(
        self,
        *,
        request_id: str,
        sampling: SamplingParams,
        prompt: str | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        deadline_s: float | None = None,
        tenant: str = "",
    ) -> Request:
        """Exactly one of prompt, prompt_token_ids and messages is given.

        Raises:
            InvalidArgument: a field is wrong; says which.
            RequestTooLong: prompt and max_tokens can never fit, with the limit.
            Unsupported: messages, but the model has no chat template.
        """
        if sum(given is not None for given in (prompt, prompt_token_ids, messages)) != 1:
            raise InvalidArgument("prompt", "give exactly one of text, token ids and chat messages")
        if prompt_token_ids is not None:
            token_ids = list(prompt_token_ids)
        elif messages is not None:
            token_ids = self.tokenizer.apply_chat_template(_checked_messages(messages))
        else:
            token_ids = self.tokenizer.encode(prompt or "")
        self._check_prompt(token_ids)
        self._check_length(len(token_ids), sampling)
        self._check_beams(sampling)
        self._check_stops(sampling)
        number = next(self._counter)
        if sampling.seed is None and not sampling.beam_width:
            sampling = dataclasses.replace(sampling, seed=_derived_seed(self._seed, number))
        return Request(
            request_id=request_id or f"request-{number}",
            prompt_token_ids=tuple(token_ids),
            sampling=sampling,
            prompt=prompt,
            deadline_s=deadline_s,
            tenant=tenant,
        )

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidArgument("prompt", "is empty: at least one token is needed")
        vocab_size = self._geometry.vocab_size
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise InvalidArgument("prompt.token_ids", f"{token_id!r} is not a token id from 0 to {vocab_size - 1}")

    def _check_length(self, num_prompt_tokens: int, sampling: SamplingParams) -> None:
        max_tokens, geometry = sampling.max_tokens, self._geometry
        total, num_rows = num_prompt_tokens + max_tokens, sampling.beam_width or sampling.num_samples
        if num_rows > geometry.max_num_seqs:
            name = "beam_width" if sampling.beam_width else "best_of" if sampling.best_of else "n"
            raise InvalidArgument(f"sampling.{name}", f"{num_rows} is over max_num_seqs ({geometry.max_num_seqs})")
        what = f"{num_prompt_tokens} prompt tokens and {max_tokens} to generate make {total}"
        if total > geometry.max_model_len:
            raise RequestTooLong("sampling.max_tokens", f"{what}, over max_model_len ({geometry.max_model_len})")
        num_shared = num_prompt_tokens // geometry.block_size
        needed = num_shared + num_rows * (-(-total // geometry.block_size) - num_shared)
        if needed > geometry.num_blocks:
            pool_tokens = geometry.num_blocks * geometry.block_size
            blocks = f"{geometry.num_blocks} blocks of {geometry.block_size}"
            times = f" for each of {num_rows} sequences, {needed} blocks" if num_rows > 1 else ""
            raise RequestTooLong("sampling.max_tokens", f"{what}{times}, over the whole pool ({pool_tokens}: {blocks})")

    def _check_beams(self, sampling: SamplingParams) -> None:
        if not sampling.beam_width:
            return
        num_ending = len(sampling.ending_ids(self.eos_token_ids))
        needed = num_candidates(sampling.beam_width, num_ending)
        if needed > TOP_WIDTH:
            raise InvalidArgument(
                "sampling.beam_width",
                f"{sampling.beam_width} with {num_ending} ending tokens ranks {needed} candidates a beam; "
                f"the device reports {TOP_WIDTH}",
            )

    def _check_stops(self, sampling: SamplingParams) -> None:
        vocab_size = self._geometry.vocab_size
        for token_id in sampling.stop_token_ids:
            if token_id >= vocab_size:
                raise InvalidArgument("sampling.stop_token_ids", f"{token_id} is not below {vocab_size}")
        if sampling.stop and isinstance(self.tokenizer, NoTokenizer):
            raise InvalidArgument("sampling.stop", "this model has no tokenizer, so no text: use stop_token_ids")


def _checked_messages(messages: Sequence[Mapping[str, str]]) -> Sequence[Mapping[str, str]]:
    if not messages:
        raise InvalidArgument("chat.messages", "is empty: at least one message is needed")
    for i, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str) or not message[key]:
                raise InvalidArgument(f"chat.messages[{i}].{key}", "is missing or empty")
    return messages


def _derived_seed(engine_seed: int, number: int) -> int:
    digest = hashlib.sha256(f"{engine_seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "little")
