"""Tokens -> text: each character once and whole, at the same cost however long a sequence is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jpaged.engine.tokenizer import Tokenizer
from jpaged.types import TextState

_REPLACEMENT = "\ufffd"
_MAX_CHARACTER_TOKENS = 4
"""A UTF-8 character has at most four bytes, so no more than four byte tokens wait for each other."""
_CONTEXT_TOKENS = 4
"""Tokens of the prompt decoded along with the first output, because tokenizers strip a leading space."""


_MAX_REMEMBERED = 1 << 16
"""Texts that are kept: 10 MB."""


class Decoder(Protocol):
    """What is asked of a tokenizer here."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class RememberedTexts:
    """Decodes as a tokenizer does, and remembers the texts of one and two tokens.

    A sequence asks twice at each token: for the text of the token behind the one before it, and then for the token's
    own, which is the context of the next. Both come again soon, in this sequence or another: a look takes a tenth of
    the time of a tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[bool, dict[tuple[int, ...], str]] = {False: {}, True: {}}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text; as the tokenizer's."""
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
    """Text of a growing list of tokens, each character once and whole. Costs the same at every token."""

    def __init__(self, tokenizer: Decoder, prompt_token_ids: tuple[int, ...], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # Tokens that were turned into text but are the context of the next ones, then those that were not.
        self._window = self._context(prompt_token_ids)
        self._num_read = len(self._window)
        self._text_read = self._decode(self._window)

    def go_on(self, state: TextState) -> None:
        """Takes the place of one that has come to a state."""
        self._window, self._num_read, self._text_read = list(state.window), state.num_read, state.text_read

    def state(self, held: str) -> TextState:
        """Where it is now, and what is held back of its text."""
        return TextState(tuple(self._window), self._num_read, self._text_read, held)

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text == self._text_read and not self._decode([token_id, token_id]):
            self._window.pop()  # it has no text in any company, so it is nobody's context, and many would make it long
            return ""
        if not text.endswith(_REPLACEMENT):
            return self._read(text, len(self._window))
        if len(self._window) - self._num_read >= _MAX_CHARACTER_TOKENS:
            end = self._num_read + 1
            return self._read(self._decode(self._window[:end]), end)
        return ""

    def flush(self) -> str:
        """Returns what is left of a character that was never completed."""
        return self._read(self._decode(self._window), len(self._window))

    def _context(self, prompt_token_ids: tuple[int, ...]) -> list[int]:
        """The last tokens of a prompt, from the beginning of a character if one is near."""
        for num_tokens in range(_CONTEXT_TOKENS, 2 * _CONTEXT_TOKENS):
            window = list(prompt_token_ids[-num_tokens:])
            if not self._decode(window).startswith(_REPLACEMENT):
                return window
        return list(prompt_token_ids[-_CONTEXT_TOKENS:])

    def _read(self, text: str, end: int) -> str:
        """Returns what is new in the text of the window up to `end`: a character that the prompt begins is."""
        start = len(self._text_read)
        if self._text_read.endswith(_REPLACEMENT):
            both = zip(self._text_read, text, strict=False)
            start = next((place for place, (old, new) in enumerate(both) if old != new), min(start, len(text)))
        new = text[start:]
        if new:
            # What was just read is the context of what comes next; what came before it is no longer needed.
            self._window = self._window[self._num_read :]
            end -= self._num_read
            text = self._decode(self._window[:end])
        self._num_read, self._text_read = end, text
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class NoText:
    """Stands in for a detokenizer where nobody wants text, or there is none."""

    def go_on(self, state: TextState) -> None:
        """It is always at the beginning."""

    def state(self, held: str) -> TextState:
        """The beginning."""
        return TextState()

    def push(self, token_id: int) -> str:
        """No characters."""
        return ""

    def flush(self) -> str:
        """Nothing is left."""
        return ""
