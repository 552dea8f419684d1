"""LongRoPE: models that rotate keys differently once a sequence exceeds a length.

    up to the length   [ k k k k k k ]          keys with the short factors
    one token more     [ K K K K K K K ]        all are recomputed with the long factors, once
    from there on      [ K K K K K K K K ]      as usual

Phi-3 is such a model. The sequences of a group share its prompt, so they wait for each other and are recomputed
together.
"""

from __future__ import annotations

from collections.abc import Iterable

from jpaged.engine.kv_cache.interface import KVCacheManager
from jpaged.engine.sequence import Sequence, SequenceGroup

_NEVER = 1 << 30


class LongRopeRecompute:
    """Recomputation of groups whose sequences pass the LongRoPE length.

    Args:
        length: number of tokens up to which keys use the short factors.
    """

    def __init__(self, memory: KVCacheManager, length: int) -> None:
        self._memory = memory
        self._length = length

    def num_left(self, sequence: Sequence) -> int:
        """Return the number of tokens that a sequence may compute before it must be recomputed."""
        if sequence.rope_len > self._length:
            return _NEVER
        return max(0, self._length - sequence.num_computed_tokens)

    def begin_again(self, running: Iterable[SequenceGroup]) -> int:
        """Rewind the groups that are due for recomputation; return the number of tokens to compute again."""
        num_tokens = 0
        for group in running:
            if self._is_due(group):
                num_tokens += self._begin_again(group)
        return num_tokens

    def _is_due(self, group: SequenceGroup) -> bool:
        """Return True if all unfinished sequences have computed up to the length and their tokens are known."""
        most, live = group.request.sampling.max_num_tokens, group.live
        if not group.is_forked or any(sequence.num_in_flight_tokens > 1 for sequence in live):
            return False
        going = [sequence for sequence in live if sequence.num_output_tokens < most]
        return bool(going) and all(each.num_uncomputed_tokens > 0 == self.num_left(each) for each in going)

    def _begin_again(self, group: SequenceGroup) -> int:
        for sequence in group.live:
            if self._memory.prefixes is not None:
                self._memory.prefixes.register_full_blocks(sequence)
            sequence.switch_to_long_rope(self._length)
            self._memory.rewind(sequence)
        group.reset_for_recompute()
        return group.live[0].num_prompt_tokens + sum(sequence.num_output_tokens for sequence in group.live)
