"""Protocol of proposers on the host, and prompt lookup.

    begin(key, prompt, sharing)     extend(key, tokens)     propose(key, limit)     remove(key)
    a sequence is admitted          tokens were accepted    before a step           it ended

A proposer receives the tokens of a sequence and returns likely next ones. Proposals never change the output: a step
samples as it would without them, and a draft token is accepted only if it equals the sampled token. So a proposer may
be wrong, late or silent.

Draft models and EAGLE heads run on the device and do not implement this protocol.

Prompt lookup proposes what followed the same n-gram earlier in the same sequence:

    ... the red fox sees ... then the red fox       3-gram "the red fox" occurred before: "sees ..." is proposed
            └─────────┘               └───────┘

The longest n-gram of `prompt_lookup_min` to `prompt_lookup_max` tokens that occurs earlier is used, as in vLLM's
`ngram` (https://github.com/vllm-project/vllm/blob/main/vllm/v1/spec_decode/ngram_proposer.py). Its earliest place is
used, because most tokens follow that. In a text that repeats itself, "a b a b a b", two tokens follow the latest place,
and four the earliest.

vLLM searches the whole sequence in every step. Here each n-gram is inserted into a hash table once, with the place of
its first end; a hit is verified against the tokens. There are two generations of tables, each of half the window. When
the newer one is full, the older one is dropped, which bounds the memory of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jpaged.config import SpeculativeOptions

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


_WINDOW = 1 << 14
"""Maximum number of recent places indexed per n-gram length; an entry takes about 120 bytes."""
_Table = dict[int, int]


@dataclass(slots=True, eq=False)
class _Lookup:
    """Tokens of one sequence, and where n-grams of each length first ended.

    Attributes:
        older: a table for each length, of the places before `since`.
        newer: a table for each length, of the places after it.
        num_indexed: number of tokens whose n-grams are indexed.
    """

    token_ids: list[int]
    older: list[_Table]
    newer: list[_Table]
    since: int = 0
    num_indexed: int = 0


@dataclass(slots=True)
class NgramProposer:
    """Proposer of what followed the longest n-gram that occurred before.

    Args:
        least: tokens of the shortest n-gram.
        most: tokens of the longest n-gram.
        window: maximum number of recent places indexed per length; at least half of it is kept.
    """

    least: int
    most: int
    window: int = _WINDOW
    _sequences: dict[int, _Lookup] = field(default_factory=dict)

    @classmethod
    def of(cls, options: SpeculativeOptions) -> NgramProposer:
        return cls(options.prompt_lookup_min, options.prompt_lookup_max)

    @property
    def num_entries(self) -> int:
        """Return the number of entries in all tables."""
        return sum(len(table) for lookup in self._sequences.values() for table in (*lookup.older, *lookup.newer))

    def begin(self, sequence_key: int, token_ids: Sequence[int], sharing: bytes | None) -> None:
        """Record the prompt; `sharing` is ignored, because a sequence is searched only for itself."""
        self._sequences[sequence_key] = _Lookup(list(token_ids), self._tables(), self._tables())

    def extend(self, sequence_key: int, new_token_ids: Sequence[int]) -> None:
        self._sequences[sequence_key].token_ids += new_token_ids

    def propose(self, sequence_key: int, limit: int) -> list[int]:
        lookup = self._sequences[sequence_key]
        self._index(lookup)
        token_ids, num_tokens = lookup.token_ids, len(lookup.token_ids)
        for n in range(min(self.most, num_tokens), self.least - 1, -1):
            ngram = token_ids[num_tokens - n :]
            key = hash(tuple(ngram))
            for tables in (lookup.older, lookup.newer):
                end = tables[n - self.least].get(key, num_tokens)
                if end < num_tokens and token_ids[end - n : end] == ngram:
                    return token_ids[end : end + max(0, limit)]
        return []

    def remove(self, sequence_key: int) -> None:
        del self._sequences[sequence_key]

    def _tables(self) -> list[_Table]:
        return [{} for _ in range(self.most - self.least + 1)]

    def _index(self, lookup: _Lookup) -> None:
        """Index new n-grams, up to the limit of tokens per call."""
        token_ids = lookup.token_ids
        begin = lookup.num_indexed
        lookup.num_indexed = stop = min(len(token_ids), begin + max(1, MAX_INDEXED_TOKENS // len(lookup.newer)))
        for end in range(begin + 1, stop + 1):
            if end - lookup.since > self.window // 2:
                lookup.older, lookup.newer, lookup.since = lookup.newer, self._tables(), end - 1
            for n, table in enumerate(lookup.newer, start=self.least):
                if n > end:
                    break
                table.setdefault(hash(tuple(token_ids[end - n : end])), end)
