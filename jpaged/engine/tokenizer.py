"""What the engine asks of a tokenizer: text <-> token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jpaged.errors import InvalidArgument, Unsupported


class Tokenizer(Protocol):
    """Text in, ids out and back. Safe to call from several threads; long texts hold up none of them."""

    @property
    def vocab_size(self) -> int:
        """Ids that it produces are below this."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def max_token_bytes(self) -> int:
        """Bytes of text for each token at most: a text that is longer has more tokens."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text; bytes that are not valid UTF-8 come out as U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, which may be a part of a character."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, max_bytes: int) -> list[int]:
        """Ids of a conversation ({"role", "content"} each), ready for the assistant's turn.

        Raises:
            Unsupported: the model has no chat template.
            InvalidArgument: the template refuses the messages, or cannot cope with them.
            RequestTooLong: the text that comes of them is over max_bytes.
        """
        ...


def is_special_token(tokenizer: Tokenizer, token_id: int) -> bool:
    """Return True if texts without special tokens leave a token out."""
    has_text = bool(tokenizer.decode([token_id], skip_special_tokens=False))
    return has_text and not tokenizer.decode([token_id], skip_special_tokens=True)


class NoTokenizer:
    """Placeholder of a model without tokenizer files, or of `--skip-tokenizer-init`: token ids in and out, no text."""

    eos_token_ids: frozenset[int] = frozenset()
    has_chat_template = False
    max_token_bytes = 1 << 30  # so that every text comes to `encode`, which says what is wrong

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise InvalidArgument("prompt", "this model is served without a tokenizer: send token ids instead of text")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, max_bytes: int) -> list[int]:
        raise Unsupported("this model is served without a tokenizer, so it has no chat template: send token ids")
