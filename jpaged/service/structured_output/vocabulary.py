"""A tokenizer as grammars see it: the bytes of each token, and the tokens that end a text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from jpaged.errors import Unsupported
from jpaged.service.tokenizer import HuggingFaceTokenizer

_CLOSING = frozenset(b'"}]:')


@dataclass(frozen=True, slots=True)
class VocabularySpec:
    """Serializable description of a vocabulary; another process builds an equal one from it.

    Attributes:
        tokenizer: the text of a tokenizer.json.
        vocab_size: V of the model; the tokenizer may have fewer ids, or more.
        eos_token_ids: sorted; at least one.
    """

    tokenizer: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Vocabulary:
    """The tokens of a model. Thread-safe.

    Raises:
        Unsupported: llguidance cannot read the tokenizer.
    """

    def __init__(self, spec: VocabularySpec) -> None:
        self.spec = spec
        self.eos_token_ids = frozenset(spec.eos_token_ids)
        try:
            self.tokenizer = _read(spec)
        except ValueError as error:
            raise Unsupported(f"structured_outputs: llguidance cannot read this tokenizer: {error}") from error
        self.num_words = num_words(spec.vocab_size)

    @classmethod
    def of(cls, tokenizer: object, vocab_size: int, eos_token_ids: Iterable[int]) -> Vocabulary:
        """Build the vocabulary of a served model.

        Args:
            tokenizer: the model's tokenizer.
            vocab_size: V, the width of the logits.
            eos_token_ids: all tokens that end a text.

        Raises:
            Unsupported: there is no tokenizer, or not one of the `tokenizers` library, or no end-of-sequence token.
        """
        text = tokenizer.to_json() if isinstance(tokenizer, HuggingFaceTokenizer) else None
        if text is None:
            raise Unsupported("structured_outputs: require a tokenizer that can be written as tokenizer.json")
        ends = tuple(sorted(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size))
        if not ends:
            raise Unsupported("structured_outputs: require an end-of-sequence token, but the model has none")
        return cls(VocabularySpec(text, vocab_size, ends))

    @cached_property
    def key(self) -> bytes:
        """Digest that identifies the vocabulary."""
        spec = self.spec
        return hashlib.sha256(repr((spec.tokenizer, spec.vocab_size, spec.eos_token_ids)).encode()).digest()

    @property
    def num_library_words(self) -> int:
        """Words of the library's masks, which cover the ids of the tokenizer too."""
        return (self.tokenizer.vocab_size + 31) // 32

    @cached_property
    def eos_mask_w(self) -> NDArray[np.int32]:
        """Mask of the tokens that end a text, int32 `[W]`."""
        return self.build_mask(self.spec.eos_token_ids)

    @cached_property
    def all_mask_w(self) -> NDArray[np.int32]:
        """Mask of every token of the model, int32 `[W]`."""
        return self.build_mask(range(self.spec.vocab_size))

    def build_mask(self, token_ids: Iterable[int]) -> NDArray[np.int32]:
        """Return the mask of some tokens, int32 `[W]`."""
        flags = np.zeros(self.num_words * 32, np.uint8)
        flags[np.fromiter(token_ids, np.int64)] = 1
        return np.packbits(flags, bitorder="little").view(np.int32)

    @cached_property
    def byte_lens_v(self) -> NDArray[np.int32]:
        """Bytes of text of each token, int32 `[V]`."""
        return np.array([len(part) for part in self._bytes_v], np.int32)

    def allowed_by(self, matcher: LLMatcher) -> NDArray[np.int32]:
        """Return the mask of the allowed tokens, int32 `[W]`."""
        return np.frombuffer(matcher.compute_bitmask(), np.uint8)[: 4 * self.num_words].view(np.int32) & self.all_mask_w

    @cached_property
    def openness_v(self) -> NDArray[np.int32]:
        """Rough distance of a token from an end, int32 `[V]`: lowest for tokens that close brackets."""
        return np.array([_openness(part) for part in self._bytes_v], np.int32)

    @cached_property
    def closers_first_v(self) -> NDArray[np.int64]:
        """Ids sorted by how likely they lead to an end, int64 `[V]`: closing tokens first, then single bytes."""
        is_long_v = (self.openness_v > 0) & (self.byte_lens_v > 1)
        return np.lexsort((self.byte_lens_v, self.openness_v, is_long_v))

    @cached_property
    def longest_first_v(self) -> NDArray[np.int64]:
        """Ids sorted by decreasing bytes of text, int64 `[V]`: fills a minimum length with the fewest tokens."""
        return np.lexsort((self.openness_v, -self.byte_lens_v))

    @cached_property
    def _bytes_v(self) -> Sequence[bytes]:
        num_known = min(self.spec.vocab_size, self.tokenizer.vocab_size)
        known = [self.tokenizer.decode_bytes([token_id]) for token_id in range(num_known)]
        return [*known, *[b""] * (self.spec.vocab_size - num_known)]


def num_words(vocab_size: int) -> int:
    """Return W, the number of words of a mask."""
    return (vocab_size + 31) // 32


def allowed_ids(mask_w: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the tokens of a mask, in order."""
    return np.flatnonzero(np.unpackbits(mask_w.view(np.uint8), bitorder="little"))


def _read(spec: VocabularySpec) -> LLTokenizer:
    try:
        return LLTokenizer(spec.tokenizer, n_vocab=spec.vocab_size, eos_token=list(spec.eos_token_ids))
    except ValueError as error:
        if "vocab size too small" not in str(error):
            raise
    # the tokenizer has ids for which the model has no logits
    return LLTokenizer(spec.tokenizer, eos_token=list(spec.eos_token_ids))


def _openness(part: bytes) -> int:
    if not part:
        return 100
    closing, opening = sum(byte in b"}]" for byte in part), sum(byte in b"{[(<," for byte in part)
    if all(byte in _CLOSING for byte in part):
        return -2 * min(closing, 1)
    if part.isspace():
        return 8
    return 1 + 2 * opening - closing
