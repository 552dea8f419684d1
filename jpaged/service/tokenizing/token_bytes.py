"""How many bytes of text a token can stand for: what tells a text that cannot fit before it is tokenised.

bytes of text >= 1 a token, at most   longest token of the vocabulary * what normalising takes away

That holds where every byte of a text ends up in some token: bytes without a token of their own become several, and
nothing is stripped, dropped or folded into one unknown token. Where it cannot be known, GENEROUS_BYTES stand in.
"""

from __future__ import annotations

import json
import re
from typing import Any

_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTEXTS = ("a", "\u2581a", "e", "\u2581e", "x", "0")
GENEROUS_BYTES = 128
"""The longest tokens of published vocabularies, runs of spaces, have so many; words and their kind have four to six."""
_SHRINKING = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 3, "ByteLevel": 1, "Prepend": 1}
"""Normalisers that only change the form of a character, and how many bytes each may turn into one."""
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}
"""Pre-tokenizers that only cut, or replace a space by something longer."""


def max_token_bytes(tokenizer: Any) -> int:
    """Bytes of text that one token of a `tokenizers.Tokenizer` stands for at most."""
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

    A byte-level vocabulary spells them in letters, and ByteFallback names single ones (`<0xE2>`). Other tokens add the
    characters that they add after another token: decoders strip a space at the start of a text alone.
    """

    def __init__(self, tokenizer: Any) -> None:
        kinds = {step["type"] for step in _steps(tokenizer.decoder, "decoders")}
        self._tokenizer = tokenizer
        self._bytes = _byte_letters() if "ByteLevel" in kinds else {}
        self._has_fallback = "ByteFallback" in kinds
        self._context = [found for name in _CONTEXTS if (found := tokenizer.token_to_id(name)) is not None][:1]

    def of(self, token_id: int) -> bytes:
        """Return the bytes of one token; none for an id that no token has."""
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
    """The letters of byte-level vocabularies: printable bytes are themselves, others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _steps(part: Any, key: str) -> list[dict[str, Any]]:
    """A normaliser or pre-tokenizer as it is written in tokenizer.json, sequences laid out flat."""
    if part is None:
        return []
    return _flat(json.loads(part.__getstate__()), key)


def _flat(step: dict[str, Any], key: str) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for one in step[key] for inner in _flat(one, key)]


def _shrinking(steps: list[dict[str, Any]]) -> int | None:
    """By how much normalising may shorten a text at most, as a factor; None where it may remove any of it."""
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
    """Whether unknown characters count one by one: no run of them becomes a single token, or none."""
    if is_byte_level:
        from tokenizers.pre_tokenizers import ByteLevel

        return type(model).__name__ == "BPE" and all(letter in vocabulary for letter in ByteLevel.alphabet())
    if getattr(model, "byte_fallback", False):
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return type(model).__name__ == "BPE" and model.unk_token is not None and not model.fuse_unk
