"""What the scheduler asks of whoever proposes tokens on the host.

    begin(key, prompt, sharing)     extend(key, tokens)     propose(key, limit)     forget(key)
    a sequence is admitted          tokens were accepted    before a step           it ended

A proposer is told what a sequence has, and asked what may come next. Proposals never decide: a step draws its tokens as
it would without them, and what was proposed counts where it is what was drawn. So a proposer may be wrong, late or
silent, and the tokens are the same.

A draft model and heads propose on the device: they are no proposers of this kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

MAX_INDEXED_TOKENS = 1024
"""Tokens that one `propose` looks through for the first time: a long prompt costs several steps a little each."""


class Proposer(Protocol):
    """Proposes what may come next in a sequence. Called by the engine thread alone.

    A call costs in proportion to the tokens that are new. Telling is cheap: what is new is looked through when somebody
    asks.
    """

    def begin(self, sequence_key: int, token_ids: Sequence[int], sharing: bytes | None) -> None:
        """A sequence of this key has these tokens, its prompt.

        Args:
            sequence_key: no other sequence has it until this one is forgotten.
            sharing: whose tokens it may profit from, and who from its own: the `root` of its `KVHandle`, which tells
                tenants, salts and adapters apart. None shares nothing.
        """
        ...

    def extend(self, sequence_key: int, new_token_ids: Sequence[int]) -> None:
        """These tokens came behind those that it has."""
        ...

    def propose(self, sequence_key: int, limit: int) -> list[int]:
        """The tokens that may come next, in order; at most `limit`, and none where there is nothing to go by."""
        ...

    def forget(self, sequence_key: int) -> None:
        """The sequence has ended: what it has is let go, or kept for others that share."""
        ...
