"""Sequences that outgrow their keys: some models turn every key otherwise once a sequence is longer than a length.

    up to the length   [ k k k k k k ]          keys of the short kind
    one token more     [ K K K K K K K ]        all are computed again, of the long kind, once
    from there on      [ K K K K K K K K ]      as ever

Phi-3's LongRoPE is so. The sequences of a group share its prompt, so they wait for each other and begin again together.
"""

from __future__ import annotations

from collections.abc import Iterable

from jpaged.engine.kv.interface import KVMemory
from jpaged.engine.sequence import Group, Sequence

_NEVER = 1 << 30


class Outgrowing:
    """Knows the length, and has groups begin again.

    Args:
        length: tokens up to which keys are of the short kind.
    """

    def __init__(self, memory: KVMemory, length: int) -> None:
        self._memory = memory
        self._length = length

    def num_left(self, sequence: Sequence) -> int:
        """Tokens of a sequence that may be computed before it has to begin again."""
        if sequence.rope_len > self._length:
            return _NEVER
        return max(0, self._length - sequence.num_computed_tokens)

    def begin_again(self, running: Iterable[Group]) -> int:
        """Takes back the blocks of groups that have to; the number of tokens that are to be computed again."""
        num_tokens = 0
        for group in running:
            if self._is_due(group):
                num_tokens += self._begin_again(group)
        return num_tokens

    def _is_due(self, group: Group) -> bool:
        """Whether all that go on have computed what their keys serve for, and the tokens of all are known."""
        most, live = group.request.sampling.max_tokens, group.live
        if not group.is_forked or any(sequence.num_in_flight_tokens > 1 for sequence in live):
            return False
        going = [sequence for sequence in live if sequence.num_output_tokens < most]
        return bool(going) and all(each.num_uncomputed_tokens > 0 == self.num_left(each) for each in going)

    def _begin_again(self, group: Group) -> int:
        for sequence in group.live:
            if self._memory.prefixes is not None:
                self._memory.prefixes.register_full_blocks(sequence)
            sequence.outgrew(self._length)
            self._memory.rewind(sequence)
        group.starts_over()
        return group.live[0].num_prompt_tokens + sum(sequence.num_output_tokens for sequence in group.live)
