"""Logits processors: per-row records, and the device slots in which a sequence's tokens are counted.

    request    biases, penalties, masks      built once: `_Constant`
    step       slot, bad words that may end  built whenever the sequence samples
    slot       acquired when the sequence first samples in a row, freed when it loses the row

A slot starts with the tokens that the host knows when it is acquired; then the device counts what it samples there.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import I32
from jpaged.engine.executor.io import (
    ANY_TOKEN,
    MASK_BITS,
    SINGLE_DTYPE,
    LogitsProcessorInputs,
    TokenCountReset,
    no_masks,
    no_singles,
    num_mask_words,
)
from jpaged.engine.sequence import Sequence, SequenceGroup
from jpaged.errors import InternalError, InvalidArgument
from jpaged.types import Request


class CountSlots:
    """Allocation of the device's count slots, numbered from 1, to sequences."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots, 0, -1))
        self._slots: dict[Sequence, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, sequence: Sequence) -> int | None:
        """Return the slot of a sequence, or None."""
        return self._slots.get(sequence)

    def take(self, sequence: Sequence) -> int:
        """Allocate a slot to a sequence; the number of slots equals the number of rows."""
        slot = self._slots[sequence] = self._free.pop()
        return slot

    def give_back(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that has lost its row; no-op without a slot."""
        slot = self._slots.pop(sequence, None)
        if slot is not None:
            self._free.append(slot)


@dataclass(frozen=True, slots=True)
class _Constant:
    """The part of the records that is the same in each step of a request.

    Attributes:
        record: element of EDIT_DTYPE, without a slot.
        singles_x: elements of SINGLE_DTYPE: biases, and bad words of one token.
        mask_w: None if all tokens are allowed.
        phrases: bad words of several tokens.
    """

    record: np.void
    singles_x: NDArray[np.void]
    mask_w: I32 | None
    phrases: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, request: Request, vocab_size: int) -> _Constant:
        sampling, record = request.sampling, LogitsProcessorInputs.neutral(1).rows_r[0]
        for name in ("repetition", "frequency", "presence"):
            record[f"{name}_r"] = getattr(sampling, f"{name}_penalty")
        record["top_n_sigma_r"], record["typical_p_r"] = sampling.top_n_sigma, sampling.typical_p
        singles = [(token_id, ANY_TOKEN, bias) for token_id, bias in (sampling.logit_bias or {}).items()]
        singles += [(word[0], ANY_TOKEN, -np.inf) for word in request.bad_word_ids if len(word) == 1]
        allowed = sampling.allowed_token_ids
        return cls(
            record,
            np.array(singles, SINGLE_DTYPE),
            None if allowed is None else build_mask(allowed, vocab_size),
            tuple(word for word in request.bad_word_ids if len(word) > 1),
        )

    def singles(self, token_ids: list[int], *, is_last_known: bool) -> list[tuple[int, int, float]]:
        """Return bans of the last token of each bad word whose start, up to the last two tokens, ends the sequence.

        The ban applies after the word's second to last token.
        """
        before = token_ids[:-1] if is_last_known else token_ids
        return [
            (word[-1], word[-2], -np.inf)
            for word in self.phrases
            if len(before) >= len(word) - 2 and before[len(before) - len(word) + 2 :] == list(word[:-2])
        ]


def build_mask(token_ids: Iterable[int], vocab_size: int) -> I32:
    """Return a bitmask that allows exactly these tokens."""
    bits = np.zeros(num_mask_words(vocab_size) * MASK_BITS, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def nothing_left(
    request: Request, token_ids: SequenceOf[int], eos_token_ids: frozenset[int], vocab_size: int
) -> InvalidArgument | None:
    """Return the error of a request whose own fields forbid every next token; None if one token is left.

    The grammar is not considered: `engine/structured_output.py` does that.

    Args:
        token_ids: tokens of one sequence, including the prompt.
    """
    sampling, number = request.sampling, len(token_ids) - len(request.prompt_token_ids)
    banned = {word[-1] for word in request.bad_word_ids if _ends_with(token_ids, word[:-1])}
    ending = sampling.ending_ids(eos_token_ids) if number < sampling.min_tokens else frozenset()
    allowed = sampling.allowed_token_ids
    if allowed is None and len(banned) + len(ending) < vocab_size:
        return None
    left = set(range(vocab_size) if allowed is None else allowed) - banned
    if left - ending:
        return None
    tokens = "every token" if allowed is None else "every token of allowed_token_ids"
    refusal = f"no token can be sampled as output token {number + 1}"
    if not left:
        return InvalidArgument("sampling.bad_words", f"forbid {tokens}: {refusal}")
    ends = "is a stop token or an end-of-sequence token" if sampling.stop_token_ids else "is an end-of-sequence token"
    also = ", or a bad word" if banned else ""
    problem = f"{sampling.min_tokens} forbids tokens that end the text, but {tokens} {ends}{also}: {refusal}"
    return InvalidArgument("sampling.min_tokens", problem)


def _ends_with(token_ids: SequenceOf[int], end: tuple[int, ...]) -> bool:
    return len(end) <= len(token_ids) and tuple(token_ids[len(token_ids) - len(end) :]) == end


class ProcessedRow(NamedTuple):
    """A row that samples, and whose logits are changed.

    Attributes:
        row_index: the row in the step.
        is_last_known: the host knows the sequence's last token; otherwise it is in flight.
    """

    row_index: int
    group: SequenceGroup
    sequence: Sequence
    is_last_known: bool


@dataclass(slots=True)
class LogitsProcessorState:
    """Builds the logits-processor records of each step.

    Attributes:
        slots: slots of token counts.
    """

    num_slots: int
    vocab_size: int
    slots: CountSlots = field(init=False)
    _constants: dict[SequenceGroup, _Constant] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = CountSlots(self.num_slots)

    def inputs(self, rows: list[ProcessedRow], num_padded: int, *, has_masks: bool = False) -> LogitsProcessorInputs:
        """Return the logits-processor inputs of a step.

        Args:
            has_masks: other rows will have masks.
        """
        records, due = LogitsProcessorInputs.neutral(num_padded).rows_r, list[TokenCountReset]()
        singles_rx: NDArray[np.void] | None = None
        mask_rw = no_masks(num_padded, self.vocab_size) if has_masks else None
        for row_index, group, sequence, is_last_known in rows:
            constant = self._constant(group)
            records[row_index] = constant.record
            embeds, token_ids = group.request.embeds, sequence.token_ids
            if embeds is not None:
                token_ids = embeds.hide(token_ids)
            if group.request.sampling.needs_counts:
                records["slots_r"][row_index] = self._slot(sequence, token_ids, due, is_last_known=is_last_known)
            found = constant.singles(token_ids, is_last_known=is_last_known)
            num_constant = len(constant.singles_x)
            if num_constant or found:
                singles_rx = no_singles(num_padded) if singles_rx is None else singles_rx
                singles_rx[row_index, :num_constant] = constant.singles_x
                singles_rx[row_index, num_constant : num_constant + len(found)] = found
            if constant.mask_w is not None or sequence.grammar is not None:
                mask_rw = no_masks(num_padded, self.vocab_size) if mask_rw is None else mask_rw
                if constant.mask_w is not None:
                    mask_rw[row_index] = constant.mask_w
        return LogitsProcessorInputs(records, singles_rx, mask_rw, tuple(due))

    def give_back(self, group: SequenceGroup) -> None:
        """Free the slots of a request that has lost its rows."""
        for sequence in group.sequences:
            self.slots.give_back(sequence)

    def discard(self, group: SequenceGroup) -> None:
        """Drop the slots and constants of a request that has ended."""
        self.give_back(group)
        self._constants.pop(group, None)

    def _constant(self, group: SequenceGroup) -> _Constant:
        found = self._constants.get(group)
        if found is None:
            found = self._constants[group] = _Constant.of(group.request, self.vocab_size)
        return found

    def _slot(
        self, sequence: Sequence, token_ids: list[int], due: list[TokenCountReset], *, is_last_known: bool
    ) -> int:
        slot = self.slots.find(sequence)
        if slot is None:
            if not is_last_known:
                raise InternalError("a sequence whose tokens are counted has a token that the host does not have")
            slot = self.slots.take(sequence)
            counted = [token_id for token_id in token_ids if token_id >= 0]  # without embeddings
            num_prompt = sequence.num_prompt_tokens - len(token_ids) + len(counted)
            due.append(TokenCountReset(slot, counted, num_prompt))
        return slot
