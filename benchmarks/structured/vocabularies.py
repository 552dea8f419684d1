"""The packaged model's tokens, and 128,000 made of them: pairs are joined, as byte-pair encoding joins them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from jpaged.demo import FOLDER

LARGE = 128_000
_MAX_CHARS = 14


@dataclass(frozen=True)
class Tokens:
    """A vocabulary.

    Attributes:
        tokenizer_json: the text of tokenizer.json.
        texts: tokens as they stand there, by id.
        encode: text -> ids.
    """

    name: str
    tokenizer_json: str
    texts: list[str]
    vocab_size: int
    eos_token_id: int
    encode: Callable[[str], list[int]]


def small() -> Tokens:
    """The packaged model's."""
    return _tokens("packaged model", json.loads(_packaged().read_text(encoding="utf-8")))


def large() -> Tokens:
    """The packaged model's with more words, of pairs of its own."""
    value = json.loads(_packaged().read_text(encoding="utf-8"))
    model, rng = value["model"], random.Random(0)
    vocabulary, merges = model["vocab"], model["merges"]
    added = {token["content"] for token in value["added_tokens"]}
    pieces = [text for text in vocabulary if text not in added]
    taken = {token["id"] for token in value["added_tokens"]} | set(vocabulary.values())
    next_id = max(taken) + 1
    while next_id < LARGE:
        left, right = rng.choice(pieces), rng.choice(pieces[:2000])
        text = left + right
        if len(text) > _MAX_CHARS or text in vocabulary or right.startswith("Ġ"):
            continue
        vocabulary[text] = next_id
        merges.append([left, right] if isinstance(merges[0], list) else f"{left} {right}")
        pieces.append(text)
        next_id += 1
    return _tokens("128,000 tokens", value)


def _tokens(name: str, value: dict) -> Tokens:
    text = json.dumps(value)
    tokenizer = Tokenizer.from_str(text)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    texts = [tokenizer.id_to_token(token_id) or "" for token_id in range(size)]
    eos = tokenizer.token_to_id("<|endoftext|>")
    return Tokens(name, text, texts, size, eos, lambda one: tokenizer.encode(one, add_special_tokens=False).ids)


def _packaged() -> Path:
    return FOLDER / "tokenizer.json"
