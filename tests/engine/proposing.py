"""A proposer that knows what will come, and is wrong now and then; and rules that always run what there is."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence

from jpaged.engine.speculative.controller import AdaptationState, AdaptiveSpeculation, StepCosts
from jpaged.engine.speculative.draft_model import SpecRoundPolicy


class Guesses:
    """Implements `Proposer`.

    Proposals are the rest of an output that goes on as a sequence did so far, with a wrong token in one of three.

    Args:
        outputs: what is generated for requests.
    """

    def __init__(self, outputs: Callable[[], Iterable[Sequence[int]]], vocab_size: int) -> None:
        self._outputs = outputs
        self._vocab_size = vocab_size
        self._generated: dict[int, list[int]] = {}

    @property
    def num_sequences(self) -> int:
        return len(self._generated)

    def begin(self, sequence_key: int, token_ids: Sequence[int], sharing: bytes | None) -> None:
        assert sequence_key not in self._generated and token_ids
        self._generated[sequence_key] = []

    def extend(self, sequence_key: int, new_token_ids: Sequence[int]) -> None:
        assert new_token_ids
        self._generated[sequence_key] += new_token_ids

    def propose(self, sequence_key: int, limit: int) -> list[int]:
        generated, digest = self._generated[sequence_key], zlib.crc32(repr(self._generated[sequence_key]).encode())
        length = len(generated)
        found = [list(one[length:]) for one in self._outputs() if list(one[:length]) == generated and len(one) > length]
        guess = found[digest % len(found)] if found else [digest % self._vocab_size] * (digest % 4)
        if guess and digest % 3 == 0:
            place = digest // 3 % len(guess)
            guess[place] = (guess[place] + 1) % self._vocab_size
        return guess[:limit]

    def remove(self, sequence_key: int) -> None:
        del self._generated[sequence_key]


class Always(AdaptiveSpeculation):
    """Runs all that is proposed, up to so many tokens of each row.

    Attributes:
        num_accepted: tokens so far.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        super().__init__(num_speculative_tokens, StepCosts(lambda num_tokens, num_rows: 1.0, (8, 16)))
        self.num_accepted = 0
        self._limit = num_speculative_tokens

    def limit(self, num_rows: int, num_other_tokens: int = 0) -> int:
        return self._limit if num_rows else 0

    def choose(
        self, sequence_keys: Sequence[int], num_available: Sequence[int], num_other_tokens: int = 0
    ) -> list[int]:
        assert len(set(sequence_keys)) == len(sequence_keys) == len(num_available)
        return list(num_available)

    def observe(
        self,
        sequence_keys: Sequence[int],
        num_proposals: Sequence[int],
        num_accepted: Sequence[int],
        seconds: float,
        num_other_tokens: int = 0,
    ) -> None:
        assert self.state is AdaptationState.ON and num_other_tokens >= 0
        assert all(0 <= got <= run for run, got in zip(num_proposals, num_accepted, strict=True))
        self.num_accepted += sum(num_accepted)


class InTurn(SpecRoundPolicy):
    """Rounds as a list says, again and again; 0 is plain steps.

    Attributes:
        num_dispatches: of rounds, so far.
    """

    def __init__(self, *nums_rounds: int) -> None:
        super().__init__()
        self.num_dispatches = 0
        self._nums_rounds = nums_rounds
        self._num_asked = 0

    def num_rounds(self, num_rows: int, size: int, longest_s: float) -> int:
        self._num_asked += 1
        return self._nums_rounds[self._num_asked % len(self._nums_rounds)]

    def took(self, size: int, tokens: float, seconds: float) -> None:
        assert tokens > 0
        self.num_dispatches += 1
