"""Tokens -> text and stops: what one sequence shows of itself, token by token.

tokens    t0 t1 t2 | t3 t4          t3 t4 do not end on a whole character yet
                   ^ read
text      "Once upon a ti" | "me."  "me." may still become the stop string "me.END"
                           ^ sent
"""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.engine.tokenizer import Tokenizer
from jpaged.types import FinishReason, SamplingParams, SequenceFinish

_REPLACEMENT = "\ufffd"
_MAX_CHARACTER_TOKENS = 4
"""A UTF-8 character has at most four bytes, so no more than four byte tokens wait for each other."""
_CONTEXT_TOKENS = 4
"""Tokens of the prompt decoded along with the first output, because tokenizers strip a leading space."""


class IncrementalDetokenizer:
    """Text of a growing list of tokens, each character once and whole. Costs the same at every token."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: tuple[int, ...], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # Tokens that were turned into text but are the context of the next ones, then those that were not.
        self._window = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._num_read = len(self._window)
        self._text_read = self._decode(self._window)

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
        """What is left of a character that never came to its end."""
        return self._read(self._decode(self._window), len(self._window))

    def _read(self, text: str, end: int) -> str:
        """What is new in the text of the window up to `end`."""
        new = text[len(self._text_read) :]
        if new:
            # What was just read is the context of what comes next; what came before it is no longer needed.
            self._window = self._window[self._num_read :]
            end -= self._num_read
            text = self._decode(self._window[:end])
        self._num_read, self._text_read = end, text
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class StopStrings:
    """Holds text back while it may be the beginning of a stop string, so that none of one is ever sent."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that can be sent, the stop string that was completed or None)."""
        if not self._stops:
            return text, None
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda match: (match[0], -len(match[1])))
            sent, self._held = self._held[:at], ""
            return sent, stop
        num_held = self._num_held_back()
        sent = self._held[: len(self._held) - num_held]
        self._held = self._held[len(self._held) - num_held :]
        return sent, None

    def flush(self) -> str:
        """The held text: the sequence ended otherwise, so it was no stop string after all."""
        sent, self._held = self._held, ""
        return sent

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that some stop string begins with."""
        longest = min(len(self._held), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one token added: text to send, and how the sequence ended if it did."""

    text: str
    finish: SequenceFinish | None


class OutputState:
    """Stop rules and text of one sequence. Knows its tokens only as they come."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens
        )
        self._stop_strings = StopStrings(tuple(sampling.stop))
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._ending_ids = sampling.ending_ids(eos_token_ids)
        self._sampling = sampling
        self._num_tokens = 0

    def push(self, token_id: int) -> TextDelta:
        """Takes the next token. After a delta with `finish` nothing may be pushed."""
        self._num_tokens += 1
        is_stop_token = token_id in self._ending_ids
        # The text of the token that ends a sequence is not part of the answer, whether or not it is a special token.
        text = self._detokenizer.flush() if is_stop_token else self._detokenizer.push(token_id)
        if not is_stop_token and self._num_tokens >= self._sampling.max_tokens:
            text += self._detokenizer.flush()
        if self._num_tokens < self._sampling.min_tokens:
            return TextDelta(text, None)
        sent, matched = self._stop_strings.push(text)
        if matched is not None:
            return TextDelta(sent, SequenceFinish(FinishReason.STOP, matched))
        if is_stop_token:
            is_named = token_id in self._stop_token_ids
            finish = SequenceFinish(FinishReason.STOP, token_id if is_named else None)
            return TextDelta(sent + self._stop_strings.flush(), finish)
        if self._num_tokens >= self._sampling.max_tokens:
            return TextDelta(sent + self._stop_strings.flush(), SequenceFinish(FinishReason.LENGTH))
        return TextDelta(sent, None)

    def flush(self) -> str:
        """Text that was held back, for a sequence that ends between two tokens."""
        sent, matched = self._stop_strings.push(self._detokenizer.flush())
        return sent if matched is not None else sent + self._stop_strings.flush()
