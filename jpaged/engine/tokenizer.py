"""Tokenizer interface of the engine: text <-> token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jpaged.errors import InvalidArgument, Unsupported


class Tokenizer(Protocol):
    """Tokenizer protocol: text to token ids and back. Thread-safe; a long text does not block other threads."""

    @property
    def vocab_size(self) -> int:
        """Upper bound of the token ids, exclusive."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def max_token_bytes(self) -> int:
        """Maximum number of text bytes per token: a longer text has more tokens."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text; bytes that are not valid UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, possibly a part of a character."""
        ...

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary spells it, for example with `Ġ` for a space; "" for unknown ones."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return class, special tokens and chat template, by the names of tokenizer_config.json."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, max_bytes: int) -> list[int]:
        """Return the token ids of a conversation ({"role", "content"} each), ready for the assistant's turn.

        Raises:
            Unsupported: the model has no chat template.
            InvalidArgument: the template refuses the messages, or fails on them.
            RequestTooLong: the rendered text exceeds max_bytes.
        """
        ...


@runtime_checkable
class PairTokenizer(Protocol):
    """A tokenizer that joins two texts, for models that compare them."""

    def encode_pair(self, first: str, second: str, limit: int | None = None) -> tuple[list[int], int | None]:
        """Return the token ids of a pair, and the first one of token type 1, if there is one.

        Args:
            limit: drop tokens of the longer text, from its end, until at most this many are left; None keeps all.
        """
        ...


def is_special_token(tokenizer: Tokenizer, token_id: int) -> bool:
    """Return True if texts without special tokens leave a token out."""
    has_text = bool(tokenizer.decode([token_id], skip_special_tokens=False))
    return has_text and not tokenizer.decode([token_id], skip_special_tokens=True)


class NoTokenizer:
    """Placeholder for a model without tokenizer files, or with `--skip-tokenizer-init`: token ids only, no text."""

    eos_token_ids: frozenset[int] = frozenset()
    has_chat_template = False
    max_token_bytes = 1 << 30  # so that every text reaches `encode`, which raises the error

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise InvalidArgument("prompt", "this model is served without a tokenizer: send token ids instead of text")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        return [""] * len(token_ids)

    def describe(self) -> dict[str, Any]:
        raise Unsupported("this model is served without a tokenizer")

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, max_bytes: int) -> list[int]:
        raise Unsupported("this model is served without a tokenizer, so it has no chat template: send token ids")
