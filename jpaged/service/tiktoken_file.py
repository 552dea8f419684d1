"""Vocabularies in tiktoken's format, as Kimi publishes them, without the Python code beside them.

A line has the bytes of a token, in base64, and its number. A text is split by a pattern. A piece that is no token
begins as bytes, and the neighbors whose result has the lowest number are joined first.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jpaged.errors import InvalidArgument

TIKTOKEN_FILE, TIKTOKEN_CLASS = "tiktoken.model", "TikTokenTokenizer"
"""The file, and the class that `tokenizer_config.json` names next to it."""
_NUM_RESERVED = 256
"""Special tokens after the vocabulary; those without a name are reserved."""
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = (f"[{letters}\\p{{Lm}}\\p{{Lo}}\\p{{M}}&&[^\\p{{Han}}]]" for letters in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def byte_letters() -> dict[str, int]:
    """Return the letters of byte-level vocabularies: printable bytes map to themselves, others to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def read_tiktoken(path: Path, added: Mapping[int, Any]) -> Any:
    """Return the tokenizer of the Rust library for a vocabulary.

    Args:
        added: tokens of `tokenizer_config.json` by id, as `tokenizers.AddedToken`.

    Raises:
        InvalidArgument: the file is broken.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    numbers = _read_numbers(path)
    letter_of_byte = {byte: letter for letter, byte in byte_letters().items()}
    names = {token: "".join(map(letter_of_byte.__getitem__, token)) for token in numbers}
    merges = [
        (names[token[:cut]], names[token[cut:]])
        for token in sorted(numbers, key=numbers.__getitem__)
        for cut in _cuts(token, numbers)
    ]
    vocabulary = {names[token]: number for token, number in numbers.items()}
    fast: Any = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(_PATTERN), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.Sequence([split, letters]), decoders.ByteLevel()
    for token_id in range(len(numbers), len(numbers) + _NUM_RESERVED):
        reserved = AddedToken(f"<|reserved_token_{token_id}|>", special=True, normalized=False)
        fast.add_tokens([added.get(token_id, reserved)])
    return fast


def _cuts(token: bytes, numbers: Mapping[bytes, int]) -> list[int]:
    """Return where a token is cut into two others, in the order in which these are joined."""
    found = [cut for cut in range(1, len(token)) if token[:cut] in numbers and token[cut:] in numbers]
    return sorted(found, key=lambda cut: (numbers[token[:cut]], numbers[token[cut:]]))


def _read_numbers(path: Path) -> dict[bytes, int]:
    """Return the number of each token.

    Raises:
        InvalidArgument: a line is no token with its number, the numbers have gaps, or a byte is missing.
    """
    numbers: dict[bytes, int] = {}
    for line, text in enumerate(path.read_bytes().splitlines(), 1):
        token, _, number = text.partition(b" ")
        try:
            numbers[base64.b64decode(token, validate=True)] = int(number)
        except (binascii.Error, ValueError) as error:
            raise InvalidArgument(
                "model", f"{path.name}: line {line} must be a token in base64 and its number"
            ) from error
    if sorted(numbers.values()) != [*range(len(numbers))] or any(bytes([byte]) not in numbers for byte in range(256)):
        raise InvalidArgument(
            "model", f"{path.name} must number its tokens from 0, without gaps, and have all 256 bytes"
        )
    return numbers
