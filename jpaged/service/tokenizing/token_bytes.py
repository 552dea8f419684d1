"""Maximum bytes of text per token: rejects a text that cannot fit before it is tokenized.

max bytes per token = longest token of the vocabulary * the shrinkage by normalization

This holds if every byte of a text ends up in some token: bytes without a token become several tokens, and nothing is
stripped, dropped or folded into one unknown token. If that is not certain, GENEROUS_BYTES is used.
"""

from __future__ import annotations

import json
import re
from typing import Any

_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTEXTS = ("a", "\u2581a", "e", "\u2581e", "x", "0")
GENEROUS_BYTES = 128
"""The longest tokens of published vocabularies, runs of spaces, have up to this size; words have four to six bytes."""
_SHRINKING = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 3, "ByteLevel": 1, "Prepend": 1}
"""Normalizers that only change the form of a character, and how many bytes each may turn into one."""
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}
"""Pre-tokenizers that only split, or replace a space by something longer."""


def max_token_bytes(tokenizer: Any) -> int:
    """Return the maximum bytes of text that one token of a `tokenizers.Tokenizer` stands for."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    steps = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    is_byte_level = any(step["type"] == "ByteLevel" for step in (*steps, *_steps(tokenizer.normalizer, "normalizers")))
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    longest = max(
        (len(token) if is_byte_level and token not in added else len(token.encode()) for token in vocabulary), default=1
    )
    shrinking = _shrinking(_steps(tokenizer.normalizer, "normalizers"))
    is_sound = (
        all(_is_keeping(step) for step in steps)
        and _has_every_byte(tokenizer.model, vocabulary, is_byte_level)
        and not any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    )
    if shrinking is None or not is_sound:
        return max(longest, GENEROUS_BYTES)
    return longest * shrinking


class TokenBytes:
    """The bytes that each token of a `tokenizers.Tokenizer` adds to a text.

    A byte-level vocabulary encodes bytes as letters, and ByteFallback names single bytes (`<0xE2>`). For other tokens,
    the text after another token is decoded, because decoders strip a space only at the start of a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        kinds = {step["type"] for step in _steps(tokenizer.decoder, "decoders")}
        self._tokenizer = tokenizer
        self._bytes = _byte_letters() if "ByteLevel" in kinds else {}
        self._has_fallback = "ByteFallback" in kinds
        self._context = [found for name in _CONTEXTS if (found := tokenizer.token_to_id(name)) is not None][:1]

    def of(self, token_id: int) -> bytes:
        """Return the bytes of one token; empty for an unknown id."""
        name = self._tokenizer.id_to_token(token_id)
        if name is None:
            return b""
        if self._bytes:
            known = [self._bytes.get(letter) for letter in name]
            return name.encode() if None in known else bytes(byte for byte in known if byte is not None)
        if self._has_fallback and (match := _BYTE_NAME.fullmatch(name)):
            return bytes([int(match[1], 16)])
        before, both = self._text(self._context), self._text([*self._context, token_id])
        return (both.removeprefix(before) if both.startswith(before) else self._text([token_id])).encode()

    def _text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False)) if token_ids else ""


def _byte_letters() -> dict[str, int]:
    """Return the letters of byte-level vocabularies: printable bytes map to themselves, others to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _steps(part: Any, key: str) -> list[dict[str, Any]]:
    """Return a normalizer or pre-tokenizer as in tokenizer.json, with sequences flattened."""
    if part is None:
        return []
    return _flat(json.loads(part.__getstate__()), key)


def _flat(step: dict[str, Any], key: str) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for one in step[key] for inner in _flat(one, key)]


def _shrinking(steps: list[dict[str, Any]]) -> int | None:
    """Return the factor by which normalization may shorten a text; None if it may remove arbitrary parts."""
    product = 1
    for step in steps:
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"].encode()) < len(pattern.encode()):
                return None
        elif step["type"] in _SHRINKING:
            product *= _SHRINKING[step["type"]]
        else:
            return None
    return product


def _is_keeping(step: dict[str, Any]) -> bool:
    if step["type"] in ("Split", "Punctuation"):
        return step["behavior"] != "Removed"
    return step["type"] in _KEEPING


def _has_every_byte(model: Any, vocabulary: dict[str, int], is_byte_level: bool) -> bool:
    """Return True if each unknown character counts separately: no run of them becomes a single token, or none."""
    if is_byte_level:
        from tokenizers.pre_tokenizers import ByteLevel

        return type(model).__name__ == "BPE" and all(letter in vocabulary for letter in ByteLevel.alphabet())
    if getattr(model, "byte_fallback", False):
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return type(model).__name__ == "BPE" and model.unk_token is not None and not model.fuse_unk
