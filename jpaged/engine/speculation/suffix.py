"""Suffix decoding: proposes what followed earlier occurrences of the last tokens, here or in earlier outputs.

    own tree      the sequence's prompt and output
    shared tree   the outputs of earlier requests with the same sharing key

Both trees are searched and the draft with the better score is used, the sequence's own if equal. The length of a draft
depends on the length of the match and the confidence of the counts, so little data yields short or no drafts. The
options are vLLM's (https://docs.vllm.ai/en/latest/features/speculative_decoding/suffix/).

An earlier output is stored with the end of the prompt, so that the same prompt matches it at the first token. A
sequence can use it from its next token on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jpaged.config import SpeculativeOptions
from jpaged.engine.speculation.proposer import MAX_INDEXED_TOKENS
from jpaged.engine.speculation.shared_texts import SharedTexts
from jpaged.engine.speculation.suffix_tree import DraftRule, Match, SuffixTree

_MAX_OWN_TOKENS = 1 << 15
"""Maximum number of recent tokens in a sequence's own tree; one takes about 130 bytes."""
_NUM_SETTLED = 16
"""Tokens of earlier outputs that one `propose` indexes if `forget` left some: the end of a long one."""


@dataclass(slots=True, eq=False)
class _Reader:
    """One sequence and its matches in both trees.

    Attributes:
        num_prompt_tokens: tokens of the prompt.
        sharing: key of the texts it may use; None for none.
        num_read: tokens that are in its own tree.
        seed: last of these tokens as a seed.
        num_matched: number of tokens at the last match in its own tree; 0 before the first.
        num_matched_shared: the same for the shared tree.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    sharing: bytes | None
    tree: SuffixTree
    num_read: int = 0
    seed: int = 0
    num_matched: int = 0
    num_matched_shared: int = 0
    own: Match = field(default_factory=dict)
    shared: Match = field(default_factory=dict)


class SuffixProposer:
    """Proposer of the likeliest continuation in own and earlier texts.

    Args:
        rule: rule for drafts.
        texts: outputs of earlier requests.
        max_own_tokens: maximum number of tokens in a sequence's own tree.
    """

    def __init__(self, rule: DraftRule, texts: SharedTexts, max_own_tokens: int = _MAX_OWN_TOKENS) -> None:
        self.texts = texts
        self._rule = rule
        self._longest = rule.num_tokens(rule.best_len)
        self._max_own_tokens = max_own_tokens
        self._readers: dict[int, _Reader] = {}

    @classmethod
    def of(cls, options: SpeculativeOptions) -> SuffixProposer:
        rule = DraftRule(
            options.suffix_decoding_max_tree_depth,
            options.suffix_decoding_max_spec_factor,
            options.suffix_decoding_min_token_prob,
        )
        return cls(rule, SharedTexts(rule, options.suffix_decoding_max_cached_requests))

    @property
    def num_own_leaves(self) -> int:
        return sum(reader.tree.num_leaves for reader in self._readers.values())

    def begin(self, sequence_key: int, token_ids: Sequence[int], sharing: bytes | None) -> None:
        text = list(token_ids)
        tree = SuffixTree(self._rule, self._max_own_tokens)
        self._readers[sequence_key] = _Reader(text, len(text), sharing, tree)

    def extend(self, sequence_key: int, new_token_ids: Sequence[int]) -> None:
        self._readers[sequence_key].token_ids += new_token_ids

    def propose(self, sequence_key: int, limit: int) -> list[int]:
        reader = self._readers[sequence_key]
        self.texts.settle(_NUM_SETTLED)
        num_tokens = len(reader.token_ids)
        if not self._read(reader):
            return []
        num_new, reader.num_matched = num_tokens - reader.num_matched, num_tokens
        if num_new:
            reader.own = reader.tree.advance(reader.own, reader.seed, reader.token_ids, num_new)
        best = reader.tree.draft(reader.own, limit)
        if reader.sharing is None or best.score >= min(limit, self._longest):
            return best.token_ids
        texts = self.texts.tree(reader.sharing)
        if texts is not None:
            num_new, reader.num_matched_shared = num_tokens - reader.num_matched_shared, num_tokens
            if num_new:
                reader.shared = texts.advance(reader.shared, reader.seed, reader.token_ids, num_new)
            theirs = texts.draft(reader.shared, limit)
            if theirs.score > best.score:
                self.texts.used(reader.sharing, theirs.text_number)
                best = theirs
        return best.token_ids

    def forget(self, sequence_key: int) -> None:
        """Store the output, if any, for sequences that share it."""
        reader = self._readers.pop(sequence_key)
        if reader.sharing is not None and len(reader.token_ids) > reader.num_prompt_tokens:
            begin = max(0, reader.num_prompt_tokens - self._rule.max_depth)
            self.texts.add(reader.sharing, reader.token_ids[begin:])
            self.texts.settle(MAX_INDEXED_TOKENS)

    def _read(self, reader: _Reader) -> bool:
        """Index new tokens in the own tree; return False if the limit per step leaves some."""
        token_ids, begin = reader.token_ids, reader.num_read
        end = min(len(token_ids), begin + MAX_INDEXED_TOKENS)
        if end > begin:
            reader.seed = reader.tree.grow(reader.seed, token_ids, begin, end)
            reader.num_read = end
        return end == len(token_ids)
