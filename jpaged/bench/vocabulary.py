"""Vocabulary of a model for benchmarks: ids for random prompts, and token counts of texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jpaged.errors import InvalidArgument

if TYPE_CHECKING:
    from jpaged.client import Client


class Vocabulary(Protocol):
    """Vocabulary interface for data sets."""

    size: int
    special_ids: frozenset[int]

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text, without special ones."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens."""


class TokenizerVocabulary:
    """Vocabulary of a `tokenizers` tokenizer.

    Args:
        vocab_size: rows of the embedding: a tokenizer may have ids that the model lacks.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.size = min(vocab_size or tokenizer.get_vocab_size(), tokenizer.get_vocab_size())

    def encode(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)


class FolderVocabulary(TokenizerVocabulary):
    """Vocabulary of the `tokenizer.json` in a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InvalidArgument("--tokenizer", f"folder {folder} has no tokenizer.json")
        from tokenizers import Tokenizer  # a tenth of a second

        super().__init__(Tokenizer.from_file(str(path)), _vocab_size(folder))


class ServerVocabulary:
    """Vocabulary of a jpaged server, over gRPC."""

    def __init__(self, client: Client) -> None:
        info = client.model_info()
        self._client = client
        self.size = info.vocab_size
        self.special_ids = frozenset(info.eos_token_ids)

    def encode(self, text: str) -> Sequence[int]:
        return self._client.tokenize(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._client.detokenize(token_ids, skip_special_tokens=False)


class NumberedVocabulary:
    """Ids below a size, for a server whose tokenizer is not here; supports only random prompts of ids."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self, size: int) -> None:
        self.size = size

    def encode(self, text: str) -> Sequence[int]:
        raise InvalidArgument("--tokenizer", f"is missing: the lengths of texts are counted with it ({len(text)} here)")

    def decode(self, token_ids: Sequence[int]) -> str:
        raise InvalidArgument("--tokenizer", f"is missing: {len(token_ids)} random tokens become a text with it")


def _vocab_size(folder: Path) -> int | None:
    """Return the rows of the embedding: a tokenizer may have ids that the model lacks."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_bytes())
    size = config.get("vocab_size") if isinstance(config, dict) else None
    return size if isinstance(size, int) and size > 0 else None
