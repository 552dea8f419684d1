"""How many bytes of text a token can stand for: what tells a text that cannot fit before it is tokenised.

bytes of text >= 1 a token, at most   longest token of the vocabulary * what normalising takes away

That holds where every byte of a text ends up in some token: bytes without a token of their own become several, and
nothing is stripped, dropped or folded into one unknown token. Where it cannot be known, GENEROUS_BYTES stand in.
"""

from __future__ import annotations

import json
from typing import Any

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
