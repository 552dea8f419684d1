"""Protocol of a proposer that runs on the host.

    begin(key, prompt, sharing)     extend(key, tokens)     propose(key, limit)     remove(key)
    a sequence is admitted          tokens were accepted    before a step           it ended

A proposer receives the tokens of a sequence and returns likely next ones. Proposals never change the output: a step
samples as it would without them, and a draft token is accepted only if it equals the sampled token. So a proposer may
be wrong, late or silent.

Draft models and EAGLE heads run on the device and do not implement this protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

MAX_INDEXED_TOKENS = 1024
"""Maximum number of new tokens that one `propose` indexes: a long prompt is spread over several steps."""


class Proposer(Protocol):
    """Proposer of the next tokens of a sequence. Called only by the engine thread.

    The time of `propose` is proportional to the number of new tokens. The other calls are cheap: new tokens are indexed
    only by `propose`.
    """

    def begin(self, sequence_key: int, token_ids: Sequence[int], sharing: bytes | None) -> None:
        """Add a sequence with its prompt.

        Args:
            sequence_key: unique until the sequence is forgotten.
            sharing: sequences with the same value may use each other's tokens: the `root` of the `SequenceBlocks`,
                which separates tenants, salts and adapters. None shares nothing.
        """
        ...

    def extend(self, sequence_key: int, new_token_ids: Sequence[int]) -> None:
        """Append tokens to a sequence."""
        ...

    def propose(self, sequence_key: int, limit: int) -> list[int]:
        """Return up to `limit` likely next tokens, in order; empty if there is no prediction."""
        ...

    def remove(self, sequence_key: int) -> None:
        """Remove a sequence that has ended; its output may be kept for others that share it."""
        ...
