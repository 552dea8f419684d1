"""Incremental detokenization: each character is sent once and whole, at constant cost per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jpaged.engine.tokenizer import Tokenizer
from jpaged.types import TextState

_REPLACEMENT = "\ufffd"
_MAX_CHARACTER_TOKENS = 4
"""A UTF-8 character has at most four bytes, so at most four byte tokens form one."""
_CONTEXT_TOKENS = 4
"""Tokens of the prompt decoded along with the first output, because tokenizers strip a leading space."""


_MAX_REMEMBERED = 1 << 16
"""Maximum number of cached texts: 10 MB."""


class Decoder(Protocol):
    """Tokenizer interface used here."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class RememberedTexts:
    """Tokenizer wrapper that caches the texts of one and two tokens.

    Each token of a sequence needs two decodes: the token with the one before it, and the token alone as the context of
    the next. Both recur soon, in this sequence or another; a cache hit takes a tenth of the tokenizer's time.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[bool, dict[tuple[int, ...], str]] = {False: {}, True: {}}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text, as the tokenizer does."""
        if len(token_ids) > 2:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        texts, key = self._texts[skip_special_tokens], tuple(token_ids)
        text = texts.get(key)
        if text is None:
            if len(texts) >= _MAX_REMEMBERED:
                texts.clear()
            text = texts[key] = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


class IncrementalDetokenizer:
    """Text of a growing list of tokens: each character once and whole, at constant cost per token."""

    def __init__(self, tokenizer: Decoder, prompt_token_ids: tuple[int, ...], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # Tokens whose text was returned, as context of the next ones, then tokens whose text was not.
        self._window = self._context(prompt_token_ids)
        self._num_read = len(self._window)
        self._text_read = self._decode(self._window)

    def go_on(self, state: TextState) -> None:
        """Restore a state from another detokenizer."""
        self._window, self._num_read, self._text_read = list(state.window), state.num_read, state.text_read

    def state(self, held: str) -> TextState:
        """Return the current state, with the text that the caller withholds."""
        return TextState(tuple(self._window), self._num_read, self._text_read, held)

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text == self._text_read and not self._decode([token_id, token_id]):
            self._window.pop()  # it never has text, so it is no useful context, and many would make the window long
            return ""
        if not text.endswith(_REPLACEMENT):
            return self._read(text, len(self._window))
        if len(self._window) - self._num_read >= _MAX_CHARACTER_TOKENS:
            end = self._num_read + 1
            return self._read(self._decode(self._window[:end]), end)
        return ""

    def flush(self) -> str:
        """Return the rest of a character that was never completed."""
        return self._read(self._decode(self._window), len(self._window))

    def _context(self, prompt_token_ids: tuple[int, ...]) -> list[int]:
        """Return the last tokens of a prompt, from the beginning of a character if one is near."""
        for num_tokens in range(_CONTEXT_TOKENS, 2 * _CONTEXT_TOKENS):
            window = list(prompt_token_ids[-num_tokens:])
            if not self._decode(window).startswith(_REPLACEMENT):
                return window
        return list(prompt_token_ids[-_CONTEXT_TOKENS:])

    def _read(self, text: str, end: int) -> str:
        """Return the new text of the window up to `end`, including a character that the prompt begins."""
        start = len(self._text_read)
        if self._text_read.endswith(_REPLACEMENT):
            both = zip(self._text_read, text, strict=False)
            start = next((place for place, (old, new) in enumerate(both) if old != new), min(start, len(text)))
        new = text[start:]
        if new:
            # The text just read is the context of the next; the tokens before it are no longer needed.
            self._window = self._window[self._num_read :]
            end -= self._num_read
            text = self._decode(self._window[:end])
        self._num_read, self._text_read = end, text
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class NoText:
    """Detokenizer for requests without text."""

    def go_on(self, state: TextState) -> None:
        """Ignore the state: this detokenizer has none."""

    def state(self, held: str) -> TextState:
        """Return the initial state."""
        return TextState()

    def push(self, token_id: int) -> str:
        """Return no characters."""
        return ""

    def flush(self) -> str:
        """Return no characters."""
        return ""
