"""A tokenizer without a vocabulary: a token is a byte of UTF-8, plus one end-of-sequence token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jpaged import json_text
from jpaged.chat import ChatOptions
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

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < _NUM_BYTES else b"<eos>" if token_id == self.EOS else b""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, max_bytes: int) -> list[int]:
        return self.chat_ids(messages, ChatOptions(), max_bytes=max_bytes)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, *, max_bytes: int) -> list[int]:
        """Format tools, a line each, and messages, whose calls follow their content."""
        tools = "".join(f"tool: {json_text.dumps(tool.as_json())}\n" for tool in options.shown_tools)
        turns = "".join(f"{message['role']}: {_said(message)}\n" for message in messages)
        text = turns.removesuffix("\n") if options.continue_final_message else turns
        token_ids = self.encode(f"{tools}{text}{'assistant: ' if options.add_generation_prompt else ''}")
        if len(token_ids) > max_bytes:
            raise RequestTooLong("chat.messages", f"{len(token_ids)} bytes are over the limit of {max_bytes}")
        return token_ids


def _said(message: Mapping[str, Any]) -> str:
    calls = [json_text.dumps(call["function"]) for call in message.get("tool_calls") or ()]
    return " ".join([message.get("content") or "", *calls]).strip() if calls else message["content"] or ""
