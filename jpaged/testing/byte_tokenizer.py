"""A tokenizer without a vocabulary: a token is a byte of UTF-8, and one more ends a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.errors import RequestTooLong

_NUM_BYTES = 256


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 is end of sequence; ids above that have no text."""

    EOS = _NUM_BYTES

    def __init__(self, vocab_size: int = _NUM_BYTES + 1) -> None:
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset({self.EOS})

    @property
    def has_chat_template(self) -> bool:
        return True

    @property
    def max_token_bytes(self) -> int:
        return 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        parts = bytearray()
        for token_id in token_ids:
            if token_id < _NUM_BYTES:
                parts.append(token_id)
            elif token_id == self.EOS and not skip_special_tokens:
                parts += b"<eos>"
        return parts.decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, max_bytes: int) -> list[int]:
        turns = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        token_ids = self.encode(f"{turns}assistant: ")
        if len(token_ids) > max_bytes:
            raise RequestTooLong("chat.messages", f"{len(token_ids)} bytes come of them, over {max_bytes}")
        return token_ids
