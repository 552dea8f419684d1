"""The model of the fakes: the next token of a context, computable by hand, with a tokenizer and a grammar.

The tokenizer has no vocabulary: a token is a byte of UTF-8, plus one end-of-sequence token. The grammar is over token
ids without text. The allowed tokens depend on the previous ones, and often there is only one:

    tokens so far   0      1      2      3 ... length
    allowed         some   one    one    some  only the end

A hash of the previous tokens selects them, so that a wrong token changes the output.
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jpaged import json_text
from jpaged.chat import ChatOptions
from jpaged.engine.executor.io import num_mask_words
from jpaged.errors import InvalidArgument, RequestTooLong
from jpaged.structured import GrammarBatch, GrammarState, StatesOneByOne
from jpaged.types import PreparedImage

NAN = 1 << 40
"""Added to the token in a slot whose keys and values are NaN."""

Window = int | tuple[int, int] | None
"""Tokens that a KV group sees; a pair is a window and a number of sink tokens."""


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """The tokens that a row's last token sees in each KV group, with their positions, and the adapter's weight."""

    places: list[NDArray[np.int64]]
    tokens: list[NDArray[np.int64]]
    weight: int

    @classmethod
    def of(cls, context: list[int], windows: Sequence[Window], weight: int) -> SeenTokens:
        """Return everything that the last token of a context sees."""
        places = [places_seen(len(context), window) for window in windows]
        return cls(places, [np.array(context, np.int64)[of_group] for of_group in places], weight)

    @property
    def context(self) -> list[int]:
        """All tokens that the first KV group sees."""
        tokens: list[int] = (self.tokens[0] % NAN).tolist()
        return tokens

    def next_token(self, vocab_size: int) -> int:
        """Return the next token."""
        total = self.weight
        for group, (places, tokens) in enumerate(zip(self.places, self.tokens, strict=True)):
            total += (group + 1) * int(np.sum((places + 1) * (tokens % NAN)))
        return total % vocab_size


def places_seen(end: int, window: Window) -> NDArray[np.int64]:
    """Return the positions that the last of `end` tokens sees."""
    width, num_sinks = window if isinstance(window, tuple) else (window, 0)
    begin = max(0, end - width) if width else 0
    return np.concatenate([np.arange(min(num_sinks, begin)), np.arange(begin, end)])


def sampled(seen: SeenTokens, row: np.void, vocab_size: int) -> int:
    """Return the token that a row samples."""
    token_id = seen.next_token(vocab_size)
    if row["temperature_r"] > 0:
        high, low = (int(word) for word in row["seeds_r2"])
        token_id += _noise(high << 32 | low, int(row["sequence_indices_r"]), int(row["positions_r"]))
    banned = set(row["banned_token_ids_rx"].tolist())
    token_id %= vocab_size
    while token_id in banned:
        token_id = (token_id + 1) % vocab_size
    return token_id


@dataclass(frozen=True, slots=True)
class Script:
    """Samples a given answer instead of `sampled`, and then the token that ends it.

    Args:
        answers: the tokens of the answer of each sequence of a request, in turn.
        marker: the end of a prompt; no answer contains it.
        end: the token after an answer.
    """

    answers: Sequence[Sequence[int]]
    marker: Sequence[int]
    end: int

    def __call__(self, seen: SeenTokens, row: np.void, vocab_size: int) -> int:
        context, size = seen.context, len(self.marker)
        marker = list(self.marker)
        starts = (at + size for at in range(len(context) - size, -1, -1) if context[at : at + size] == marker)
        place = len(context) - next(starts, len(context))
        answer = self.answers[int(row["sequence_indices_r"]) % len(self.answers)]
        return answer[place] if place < len(answer) else self.end


def _noise(seed: int, sequence_index: int, position: int) -> int:
    return (seed * 31 + sequence_index * 17 + position * 7) % 101


def expected_tokens(
    prompt_token_ids: Sequence[int],
    num_tokens: int,
    *,
    vocab_size: int = 257,
    seed: int | None = None,
    sequence_index: int = 0,
    eos_token_ids: frozenset[int] = frozenset(),
    windows: Sequence[Window] = (None,),
    weight: int = 0,
) -> list[int]:
    """Return what a FakeExecutor generates for a prompt: up to num_tokens, or through an end-of-sequence token.

    Args:
        seed: the request's seed if its temperature is above 0; None is greedy.
        windows: of the KV groups.
        weight: of the adapter; 0 is none.
    """
    context = list(prompt_token_ids)
    while len(context) - len(prompt_token_ids) < num_tokens:
        token_id = SeenTokens.of(context, windows, weight).next_token(vocab_size)
        if seed is not None:
            token_id += _noise(seed, sequence_index, len(context))
        context.append(token_id % vocab_size)
        if context[-1] in eos_token_ids:
            break
    return context[len(prompt_token_ids) :]


_NUM_BYTES = 256


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 is end of sequence; ids above that have no text."""

    EOS = _NUM_BYTES

    def __init__(self, vocab_size: int = _NUM_BYTES + 1) -> None:
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset({self.EOS})

    @property
    def has_chat_template(self) -> bool:
        return True

    @property
    def max_token_bytes(self) -> int:
        return 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        parts = bytearray()
        for token_id in token_ids:
            if token_id < _NUM_BYTES:
                parts.append(token_id)
            elif token_id == self.EOS and not skip_special_tokens:
                parts += b"<eos>"
        return parts.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < _NUM_BYTES else b"<eos>" if token_id == self.EOS else b""

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        return [chr(one) if one < _NUM_BYTES else "<eos>" if one == self.EOS else "" for one in token_ids]

    def describe(self) -> dict[str, Any]:
        return {"tokenizer_class": type(self).__name__, "eos_token": "<eos>", "chat_template": None}

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, max_bytes: int) -> list[int]:
        return self.chat_ids(messages, ChatOptions(), max_bytes=max_bytes)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, *, max_bytes: int) -> list[int]:
        """Format tools, a line each, and messages, whose calls follow their content."""
        tools = "".join(f"tool: {json_text.dumps(tool.as_json())}\n" for tool in options.shown_tools)
        turns = "".join(f"{message['role']}: {_said(message)}\n" for message in messages)
        text = turns.removesuffix("\n") if options.continue_final_message else turns
        token_ids = self.encode(f"{tools}{text}{'assistant: ' if options.add_generation_prompt else ''}")
        if len(token_ids) > max_bytes:
            raise RequestTooLong("chat.messages", f"{len(token_ids)} bytes are over the limit of {max_bytes}")
        return token_ids


def _said(message: Mapping[str, Any]) -> str:
    if isinstance(message["content"], list):  # parts of text and images, as templates expect them
        parts = (part.get("text", chr(FakeVision.placeholder_id)) for part in message["content"])
        message = {**message, "content": "".join(parts)}
    calls = [json_text.dumps(call["function"]) for call in message.get("tool_calls") or ()]
    return " ".join([message.get("content") or "", *calls]).strip() if calls else message["content"] or ""


class FakeVision:
    """Image processor and vision encoder of a `ByteTokenizer`. A patch is the token that its mean of red names.

    A row of patches in a prompt is a space for each, which the patches replace, and a line break.

    Attributes:
        calls: numbers of images of each call of the encoder.
        gate: the encoder waits until it is set.
    """

    placeholder_id = 1
    patch_size = 8
    max_patches = 64

    def __init__(self, width: int = 2) -> None:
        self.calls: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self._width = width

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        return -(-height // self.patch_size), -(-width // self.patch_size)

    def join(self, first: int, second: int) -> int | None:
        """Return the token of two adjacent ones at an image's edge, if the tokenizer has one token for their text."""
        return None

    def count_tokens(self, width: int, height: int) -> int:
        """Return the number of tokens of an image."""
        rows, columns = self._grid(width, height)
        return rows * (columns + 1)

    def prepare(self, pixels_hwc: NDArray[np.uint8]) -> PreparedImage:
        """Return the mean of each patch; raise InvalidArgument for an image that is too large."""
        height, width, _ = pixels_hwc.shape
        rows, columns = self._grid(width, height)
        if rows * columns > self.max_patches:
            raise InvalidArgument("pixels", f"has {rows * columns} patches; at most {self.max_patches}")
        size = self.patch_size
        starts = [(row * size, column * size) for row in range(rows) for column in range(columns)]
        patches = [pixels_hwc[y : y + size, x : x + size].mean(axis=(0, 1)) for y, x in starts]
        patches_pe = np.array(patches, np.float32)
        token_ids = ([ord(" ")] * columns + [ord("\n")]) * rows
        digest = hashlib.sha256(patches_pe.tobytes()).digest()
        is_embed_t = np.array(token_ids) == ord(" ")
        return PreparedImage(patches_pe, (rows, columns), tuple(token_ids), is_embed_t, digest)

    def encode(self, images: Sequence[PreparedImage]) -> list[NDArray[np.float32]]:
        """Return a row for each patch, whose first number is the token."""
        self.gate.wait()
        self.calls.append(len(images))
        encoded = []
        for image in images:
            rows_te = np.zeros((len(image.patches_pe), self._width), np.float32)
            rows_te[:, 0] = np.rint(image.patches_pe[:, 0])
            encoded.append(rows_te)
        return encoded


_NUM_CHOICES = 7


@dataclass(slots=True)
class FakeGrammarState:
    """A `GrammarState`."""

    grammar: FakeGrammar
    token_ids: list[int] = field(default_factory=list)
    failure: str | None = None

    @property
    def is_complete(self) -> bool:
        return len(self.token_ids) >= self.grammar.length

    @property
    def has_ended(self) -> bool:
        return self.is_complete

    def allowed(self) -> list[int]:
        """Return the tokens that may come next."""
        return self.grammar.allowed_after(self.token_ids)

    def fill(self, mask_w: NDArray[np.int32]) -> None:
        bits = np.zeros(mask_w.size * 32, np.uint8)
        bits[self.allowed()] = 1
        mask_w[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        if token_id not in self.allowed():
            return False
        self.token_ids.append(token_id)
        if self.grammar.fails_after is not None and len(self.token_ids) >= self.grammar.fails_after:
            self.failure = "as configured"
        return True

    def forced(self, limit: int) -> list[int]:
        found: list[int] = []
        while len(found) < limit and len(self.token_ids) + len(found) < self.grammar.length:
            allowed = self.grammar.allowed_after([*self.token_ids, *found])
            if len(allowed) > 1:
                break
            found += allowed
        return found

    def num_accepted(self, token_ids: Sequence[int]) -> int:
        state = self.copy()
        return next((i for i, token_id in enumerate(token_ids) if not state.accept(token_id)), len(token_ids))

    def closing(self, num_tokens_left: int) -> None:
        self.grammar = replace(self.grammar, length=min(self.grammar.length, len(self.token_ids) + num_tokens_left))

    def copy(self) -> FakeGrammarState:
        return FakeGrammarState(self.grammar, list(self.token_ids), self.failure)


@dataclass(frozen=True, slots=True)
class FakeGrammar:
    """A `Grammar`.

    Attributes:
        length: tokens before the end.
        salt: another number gives another grammar.
        fails_after: number of tokens after which the grammar fails; None never fails.
        is_free: several tokens are allowed everywhere except at the end.
    """

    vocab_size: int
    eos_token_id: int
    length: int
    salt: int = 0
    fails_after: int | None = None
    is_free: bool = False

    def start(self) -> FakeGrammarState:
        return FakeGrammarState(self)

    def allowed_after(self, token_ids: list[int]) -> list[int]:
        """Return the tokens that may follow these."""
        if len(token_ids) >= self.length:
            return [self.eos_token_id]
        digest = zlib.crc32(repr((self.salt, token_ids)).encode())
        num_choices = 1 if digest % 3 and not self.is_free else _NUM_CHOICES
        others = [token_id for token_id in range(self.vocab_size) if token_id != self.eos_token_id]
        return [others[(digest + 31 * i) % len(others)] for i in range(num_choices)]


@dataclass(slots=True)
class FakeMasks:
    """A `GrammarMasks`."""

    vocab_size: int
    num_filled: int = 0

    @property
    def num_words(self) -> int:
        return num_mask_words(self.vocab_size)

    def batch(self, states: Sequence[GrammarState], rows: Sequence[int]) -> GrammarBatch:
        return StatesOneByOne(states, rows)

    def fill(self, states: Sequence[GrammarState | None], mask_rw: NDArray[np.int32]) -> None:
        for mask_w, state in zip(mask_rw, states, strict=True):
            mask_w[:] = -1
            if state is not None:
                state.fill(mask_w)
                self.num_filled += 1
