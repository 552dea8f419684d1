"""Interface of a grammar for the engine: the allowed next tokens. Independent of the grammar library.

    compiled.start() -> state          one state for each sequence; `copy` when sequences fork
    masks.fill(states, mask_rw)        while the device runs `forward`: before each `sample`
    state.accept(token)                the sampled token
    state.forced(limit)                forced tokens: appended without a step each (jump-forward)
    masks.batch(states, rows)          for several steps of the same rows

A mask has a bit for each token: token t is bit t % 32 of word t // 32, and W words hold the vocabulary.

For the engine, a thinking budget is a grammar, too. It counts the tokens between two tags, and allows every token, or
those of another grammar, until the closing tag is due; then it forces that tag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray


class GrammarState(Protocol):
    """State of one sequence in its grammar. Used by one thread at a time."""

    @property
    def is_complete(self) -> bool:
        """True if the text may end here: end-of-sequence tokens are allowed."""
        ...

    @property
    def has_ended(self) -> bool:
        """True if only an end-of-sequence token may follow; stays True after one."""
        ...

    @property
    def failure(self) -> str | None:
        """Reason why the grammar cannot continue, such as a work limit per step; None if it can."""
        ...

    def fill(self, mask_w: np.ndarray) -> None:
        """Write the mask of allowed tokens into int32 `[W]`, including end-of-sequence tokens if the text may end."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance over a token; return False, without a change, if it is not allowed."""
        ...

    def forced(self, limit: int) -> list[int]:
        """Return up to `limit` next tokens that are each the only allowed one. The state does not change.

        Appending them gives the same tokens as masks would. End-of-sequence tokens are not included.
        """
        ...

    def num_accepted(self, token_ids: Sequence[int]) -> int:
        """Return the number of leading tokens of a draft that are allowed in sequence. The state does not change."""
        ...

    def closing(self, num_tokens_left: int) -> None:
        """Keep the text complete: from here on allow only what can be finished in this number of accepted tokens.

        End-of-sequence tokens do not count: with none left the text is complete, and nothing else is allowed.
        """
        ...

    def copy(self) -> Self:
        """Return an independent copy."""
        ...


class Grammar(Protocol):
    """A compiled grammar, shared by all requests with the same constraint. Thread-safe."""

    def start(self) -> GrammarState:
        """Return a state at the beginning."""
        ...


class GrammarBatch(Protocol):
    """The same rows for several steps, with minimal work per row and step."""

    def accept(self, token_ids: Sequence[int]) -> list[int]:
        """Advance each state over its token; return the indices of states whose token is not allowed."""
        ...

    def fill(self, mask_rw: np.ndarray) -> bool:
        """Write the masks of the rows; return False if a state has failed."""
        ...


class GrammarMasks(Protocol):
    """Fills masks of a whole batch."""

    def batch(self, states: Sequence[GrammarState], rows: Sequence[int]) -> GrammarBatch:
        """Return a batch of states with these rows of the mask."""
        ...

    @property
    def num_words(self) -> int:
        """W, the words of a mask."""
        ...

    def fill(self, states: Sequence[GrammarState | None], mask_rw: np.ndarray) -> None:
        """Write each row's mask into int32 `[R, W]`, on several threads without the GIL; None allows every token."""
        ...


@dataclass(frozen=True, slots=True)
class StatesOneByOne:
    """A `GrammarBatch` for states of any kind."""

    states: Sequence[GrammarState]
    rows: Sequence[int]

    def accept(self, token_ids: Sequence[int]) -> list[int]:
        pairs = enumerate(zip(self.states, token_ids, strict=True))
        return [place for place, (state, token_id) in pairs if not state.accept(token_id)]

    def fill(self, mask_rw: np.ndarray) -> bool:
        for state, row in zip(self.states, self.rows, strict=True):
            state.fill(mask_rw[row])
        return all(state.failure is None for state in self.states)


@dataclass(frozen=True, slots=True)
class TagTexts:
    """The tags as text, for models that split them into other tokens than their tokenizer does.

    Attributes:
        open_tag: the tag that begins reasoning.
        close_tag: the tag that ends it.
        text_of: returns the text of one token, special tokens included.
    """

    open_tag: str
    close_tag: str
    text_of: Callable[[int], str]


class ThinkingBudget:
    """Token counter of one sequence that forces the closing tag when the budget is used up.

    All thinking of a sequence shares one budget: once it is used up, a second opening is closed at once. Tags do not
    count, except that the first tokens of a closing tag of several tokens count until the tag is complete. Must not be
    shared between threads.

    With `texts`, tags are found in the decoded text, however the model splits them, but the opening one only at the
    start, because an answer may quote it. Otherwise, and for a later opening tag, the tokens must be those of the
    tokenizer.

    Args:
        open_ids: the opening tag's tokens; empty if a sequence always begins open.
        close_ids: the closing tag's tokens, at least one.
        budget: maximum tokens of thinking, 0 or more.
        is_open_at_start: the prompt ends with the opening tag.
        texts: the same tags as text.
    """

    __slots__ = (
        "_budget",
        "_close_ids",
        "_is_at_start",
        "_num_matched",
        "_num_used",
        "_open_ids",
        "_pieces",
        "_texts",
        "is_open",
    )

    def __init__(
        self,
        open_ids: Sequence[int],
        close_ids: Sequence[int],
        budget: int,
        *,
        is_open_at_start: bool,
        texts: TagTexts | None = None,
    ) -> None:
        if not close_ids:
            raise ValueError("close_ids must hold at least one token")
        if budget < 0:
            raise ValueError(f"budget {budget} must be at least 0")
        self._open_ids = tuple(open_ids)
        self._close_ids = tuple(close_ids)
        self._budget = budget
        self._texts = texts
        self._num_used = 0
        self._num_matched = 0
        self._pieces: tuple[str, ...] = ()
        self._is_at_start = not is_open_at_start
        self.is_open = is_open_at_start

    @property
    def num_used(self) -> int:
        """Number of thinking tokens so far."""
        return self._num_used

    def push(self, token_id: int) -> None:
        """Count the next token."""
        tag = self._close_ids if self.is_open else self._open_ids
        self._num_used += self.is_open
        is_whole = False
        if tag:
            self._num_matched = _next_match(tag, self._num_matched, token_id)
            is_whole = self._num_matched == len(tag)
        if not (self._texts is not None and self._read(self._texts, token_id)) and is_whole:
            self._pieces = ()
            self._toggle(len(tag))

    def forced(self) -> int | None:
        """Return the token of the closing tag that must come next; None if any may."""
        if not self.is_open or self._num_used < self._budget:
            return None
        return self._close_ids[self._num_matched]

    def copy(self) -> ThinkingBudget:
        """Return an independent copy, for tokens that may be rewound."""
        twin = ThinkingBudget(
            self._open_ids, self._close_ids, self._budget, is_open_at_start=self.is_open, texts=self._texts
        )
        twin._num_used, twin._num_matched = self._num_used, self._num_matched
        twin._pieces, twin._is_at_start = self._pieces, self._is_at_start
        return twin

    def _toggle(self, num_tag_tokens: int) -> None:
        self._num_used -= num_tag_tokens if self.is_open else 0
        self._num_matched = 0
        self._is_at_start = False
        self.is_open = not self.is_open

    def _read(self, texts: TagTexts, token_id: int) -> bool:
        """Search the text of the last tokens for a tag; return True if one ends in this token."""
        if not (self.is_open or self._is_at_start):
            return False
        text = texts.text_of(token_id)
        self._pieces = (*self._pieces, text) if text else self._pieces
        found = False
        while self.is_open or self._is_at_start:
            whole = "".join(self._pieces)
            tag = texts.close_tag if self.is_open else texts.open_tag
            at = whole.find(tag) if self.is_open else _at_start(whole, tag)
            if at is None or at < 0:
                self._is_at_start = self._is_at_start and at is not None
                break
            found = True
            self._toggle(_num_overlapping(self._pieces, at))
            self._pieces = (whole[at + len(tag) :],)
        while self._pieces and sum(map(len, self._pieces[1:])) >= len(texts.close_tag) and self.is_open:
            self._pieces = self._pieces[1:]
        return found


def _at_start(text: str, tag: str) -> int | None:
    """Return the position of a tag at the start of a text, -1 if it may still become one, None if it is none."""
    rest = text.lstrip()
    if rest.startswith(tag):
        return len(text) - len(rest)
    return -1 if tag.startswith(rest) else None


def _num_overlapping(pieces: Sequence[str], at: int) -> int:
    """Return the number of pieces that end after a position of the joined text."""
    ends, end = 0, 0
    for piece in pieces:
        end += len(piece)
        ends += end > at
    return ends


def _next_match(tag: Sequence[int], num_matched: int, token_id: int) -> int:
    """Return how many leading tokens of a tag match the end of the sequence after one more token."""
    seen = (*tag[:num_matched], token_id)
    return next(size for size in range(len(seen), -1, -1) if seen[len(seen) - size :] == tuple(tag[:size]))


@dataclass(slots=True)
class ThinkingState:
    """A `GrammarState` that ends thinking when its budget is used up.

    Attributes:
        text: state of another grammar for the text; None allows everything.
    """

    budget: ThinkingBudget
    text: GrammarState | None = None

    @property
    def is_complete(self) -> bool:
        return self.text is None or self.text.is_complete

    @property
    def has_ended(self) -> bool:
        return self.text is not None and self.text.has_ended

    @property
    def failure(self) -> str | None:
        return None if self.text is None else self.text.failure

    def fill(self, mask_w: NDArray[np.int32]) -> None:
        if self.text is None:
            mask_w[:] = -1
        else:
            self.text.fill(mask_w)
        due = self.budget.forced()
        if due is not None and mask_w.view(np.uint32)[due // 32] >> np.uint32(due % 32) & 1:
            mask_w[:] = 0
            mask_w.view(np.uint32)[due // 32] = np.uint32(1) << np.uint32(due % 32)

    def accept(self, token_id: int) -> bool:
        if self.text is not None and not self.text.accept(token_id):
            return False
        self.budget.push(token_id)
        return True

    def forced(self, limit: int) -> list[int]:
        state, found = self.copy(), list[int]()
        while len(found) < limit:
            due = state.budget.forced()
            if due is None or not state.accept(due):
                of_text = [] if state.text is None else state.text.forced(1)
                if not of_text or not state.accept(of_text[0]):
                    break
                due = of_text[0]
            found.append(due)
        return found

    def num_accepted(self, token_ids: Sequence[int]) -> int:
        state = self.copy()
        for index, token_id in enumerate(token_ids):
            due = state.budget.forced()
            is_due = due is None or token_id == due or (state.text is not None and not state.text.num_accepted([due]))
            if not is_due or not state.accept(token_id):
                return index
        return len(token_ids)

    def closing(self, num_tokens_left: int) -> None:
        if self.text is not None:
            self.text.closing(num_tokens_left)

    def copy(self) -> ThinkingState:
        return ThinkingState(self.budget.copy(), None if self.text is None else self.text.copy())


@dataclass(frozen=True, slots=True)
class ThinkingGrammar:
    """A `Grammar` of a budget, and of an optional other grammar for the text.

    Attributes:
        budget: its state before the first token.
    """

    budget: ThinkingBudget
    text: Grammar | None = None

    def start(self) -> ThinkingState:
        return ThinkingState(self.budget.copy(), None if self.text is None else self.text.start())
