"""Logits processors of a fake executor: token counts that are checked against the rows' own tokens, and changed tokens.

A token t that a row would sample becomes the first of t + shift, t + shift + 1, ... that is allowed, where

    shift = 4 (repetition - 1) * distinct tokens + 4 frequency * generated tokens + 4 presence * distinct generated ones

so that a token that is missed or counted twice changes the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jpaged.engine.executor.rows import ANY_TOKEN, MASK_BITS, CountDue, EditInputs
from jpaged.errors import InternalError


@dataclass(slots=True)
class CountedTokens:
    """The tokens that are counted in each slot."""

    _tokens: dict[int, list[int]] = field(default_factory=dict)
    _num_prompt: dict[int, int] = field(default_factory=dict)

    def count(self, due: Sequence[CountDue], num_slots: int) -> None:
        """Reset these slots, and count their tokens."""
        for slot, token_ids, num_prompt in due:
            if not 1 <= slot <= num_slots:
                raise InternalError(f"tokens are to be counted in slot {slot} of {num_slots}")
            self._tokens[slot], self._num_prompt[slot] = list(token_ids), num_prompt

    def edited(
        self,
        token_id: int,
        edits: EditInputs,
        row: int,
        context: list[int],
        vocab_size: int,
        banned_ids: frozenset[int] = frozenset(),
    ) -> int | None:
        """Return the token that a row samples, counted if the row has a slot; None if nothing is allowed.

        Args:
            context: all tokens of the row's sequence.
            banned_ids: further tokens that the row may not sample.

        Raises:
            InternalError: the slot counts other tokens than the context.
        """
        record = edits.rows_r[row]
        slot, last = int(record["slots_r"]), int(context[-1])
        if slot:
            counted = self._tokens.get(slot)
            if counted != context:
                raise InternalError(f"slot {slot} of row {row} counts {counted}, of {context}")
            token_id += _shift(record, counted, self._num_prompt[slot])
        unlikely, allowed = set[int](), set(range(vocab_size)) - banned_ids
        if edits.singles_rx is not None:
            singles = edits.singles_rx[row]
            applies = (singles["after"] == ANY_TOKEN) | (singles["after"] == last)
            unlikely = set(singles["ids"][applies & (singles["values"] < 0)].tolist())
            allowed -= set(singles["ids"][applies & np.isneginf(singles["values"])].tolist())
        if edits.mask_rw is not None:
            mask = edits.mask_rw[row].astype(np.uint32)
            allowed = {t for t in allowed if mask[t // MASK_BITS] >> np.uint32(t % MASK_BITS) & 1}
        likely = allowed - unlikely or allowed
        in_order = (t % vocab_size for t in range(token_id, token_id + vocab_size))
        chosen = next((t for t in in_order if t in likely), None)
        if slot:
            self._tokens[slot].append(chosen or 0)
        return chosen


def _shift(record: np.void, tokens: list[int], num_prompt: int) -> int:
    generated = tokens[num_prompt:]
    parts = (
        (float(record["repetition_r"]) - 1) * len(set(tokens)),
        float(record["frequency_r"]) * len(generated),
        float(record["presence_r"]) * len(set(generated)),
    )
    return round(4 * sum(parts))
