"""Text <-> token ids: what the engine needs of a tokenizer, and the adapter for Hugging Face's.

Code from a model's folder is never run (trust_remote_code stays off).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jpaged.errors import InvalidArgument, Unsupported

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class Tokenizer(Protocol):
    """Text in, ids out and back. Safe to call from several threads."""

    @property
    def vocab_size(self) -> int:
        """Ids that it produces are below this."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text; bytes that are not valid UTF-8 come out as U+FFFD."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation ({"role", "content"} each), ready for the assistant's turn.

        Raises:
            Unsupported: the model has no chat template.
        """
        ...


class HuggingFaceTokenizer:
    """A tokenizer from a folder in Hugging Face layout."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer  # a second to import, and a server without text never needs it

        self._folder = folder
        self._inner: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        # The Rust tokenizer behind it is thread-safe when called itself; the Python wrapper resets its truncation on
        # every call and fails with "Already borrowed" under threads.
        self._fast: Any = self._inner.backend_tokenizer if self._inner.is_fast else None
        self._lock = threading.Lock()

    @property
    def vocab_size(self) -> int:
        return len(self._inner)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        eos = self._inner.eos_token_id
        return frozenset() if eos is None else frozenset({eos})

    @property
    def has_chat_template(self) -> bool:
        return bool(self._inner.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self._fast is not None:
            ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        with self._lock:
            return list(self._inner.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if self._fast is not None:
            return str(self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        with self._lock:
            return str(self._inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if not self._inner.chat_template:
            raise Unsupported(f"the tokenizer in {self._folder.name} has no chat template: send text or token ids")
        with self._lock:
            text = self._inner.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        return self.encode(text, add_special_tokens=False)


class NoTokenizer:
    """Stands where a model's folder has no tokenizer files: token ids in, token ids out, and no text."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset()

    @property
    def has_chat_template(self) -> bool:
        return False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise InvalidArgument("prompt", "this model has no tokenizer files: send token ids instead of text")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise Unsupported("this model has no tokenizer files, so it has no chat template: send token ids")


def load_tokenizer(folder: Path, *, vocab_size: int) -> Tokenizer:
    """The tokenizer of a model's folder; one that knows ids alone where there are no tokenizer files."""
    if any((folder / name).exists() for name in _TOKENIZER_FILES):
        return HuggingFaceTokenizer(folder)
    return NoTokenizer(vocab_size)
