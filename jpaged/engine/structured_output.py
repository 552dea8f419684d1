"""Structured output: grammar masks of the rows of a step, and tokens that a grammar forces (jump-forward decoding).

    forward n + 1 ─────────────> device
    collect n     <───────────── token t of each row
    accept t                     state of each sequence
    masks                        on the library's threads, while the device runs the forward pass
    jump                         if one token is left: it is appended with the forced tokens after it; the row's
                                 sample is discarded
    sample n + 1  ─────────────> device

A step with such a row waits for the previous step between its forward and its sample, and for nothing else. Several
steps of such rows are one dispatch: `runners.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jpaged.engine.executor import BEYOND_TOKENS, I32, SamplingInputs
from jpaged.engine.executor.io import ANY_TOKEN, MASK_BITS, num_mask_words
from jpaged.engine.output.processor import OutputProcessor
from jpaged.engine.scheduler.decode_batch import PersistentDecodeBatch
from jpaged.engine.scheduler.multi_step import MultiStepPolicy
from jpaged.engine.scheduler.output import SampledRows, SchedulerOutput
from jpaged.engine.sequence import Sequence, SequenceGroup
from jpaged.errors import InternalError, InvalidArgument, JpagedError
from jpaged.structured import GrammarBatch, GrammarMasks, GrammarState

MakeMasks = Callable[[], GrammarMasks]
"""Creates the object that fills masks; called at the first request with a grammar, when its vocabulary is loaded."""


class ConstrainedRow(NamedTuple):
    """A row of a step whose next token is constrained by a grammar.

    Attributes:
        device_row: the row on the device.
        entered: the row's index in the order in which rows were added to the schedule.
        is_plain: no other field of the request bans tokens.
        is_ahead: the row runs a draft token.
    """

    device_row: int
    entered: int
    group: SequenceGroup
    sequence: Sequence
    state: GrammarState
    is_plain: bool
    is_ahead: bool = False


def bound_rows(schedule: SchedulerOutput) -> list[ConstrainedRow]:
    """Return the rows of a step that sample for sequences with a grammar."""
    decodes, found = schedule.decodes, list[ConstrainedRow]()
    device_rows = {row_index: new for new, row_index in enumerate(schedule.order)}
    for row_index in np.flatnonzero(decodes.has_grammar_s).tolist():
        sequence = decodes.sequences[row_index]
        if sequence.grammar is not None:
            group, state = decodes.groups[row_index], sequence.grammar
            found.append(
                ConstrainedRow(device_rows.get(row_index, row_index), row_index, group, sequence, state, is_plain=True)
            )
    for row_index, row in enumerate(schedule.rows, len(decodes)):
        is_ahead = row.proposed is not None
        of_row = row.grammar if is_ahead else row.sequence.grammar
        if row.samples_token and of_row is not None:
            params = row.group.request.sampling
            is_plain = not params.bad_words and row.output_index >= params.min_tokens
            new = device_rows.get(row_index, row_index)
            found.append(ConstrainedRow(new, row_index, row.group, row.sequence, of_row, is_plain, is_ahead))
    return found


@dataclass(slots=True)
class StructuredOutputManager:
    """Follows the grammars of one engine's sequences.

    Args:
        make_masks: None if grammars are not supported.
        decoding: the rows in the persistent decode batch.
        multi_step_policy: gets the share of rows that have no choice.
    """

    make_masks: MakeMasks | None
    vocab_size: int
    decoding: PersistentDecodeBatch
    multi_step_policy: MultiStepPolicy
    _masks: GrammarMasks | None = None
    _num_forced: int = 0
    _refused: dict[Sequence, JpagedError] = field(default_factory=dict)

    def fill_bitmasks(
        self, schedule: SchedulerOutput, rows: list[ConstrainedRow], sampling: SamplingInputs, output: OutputProcessor
    ) -> Iterator[tuple[SequenceGroup, Sequence, JpagedError | None]]:
        """Apply the grammar mask of each row of a step whose forward pass is in flight.

        If a mask leaves one token, it is appended with the tokens forced after it. Yields as `accept_tokens` does.
        """
        rows = [bound for bound in rows if bound.sequence.is_live]
        if not rows:
            return
        edits = sampling.edits
        if edits is None or edits.mask_rw is None:
            raise InternalError("a row has a grammar, but its step has no masks")
        filled_rw = self._filled([bound.state for bound in rows])
        num_words_r = np.count_nonzero(filled_rw, axis=1).tolist()
        device_rows = [bound.device_row for bound in rows]
        filled_rw &= edits.mask_rw[device_rows]
        edits.mask_rw[device_rows] = filled_rw
        self.multi_step_policy.observe_forced_share(len(rows), num_words_r.count(1))
        self._refused = {sequence: error for sequence, error in self._refused.items() if sequence.is_live}
        may_jump = not schedule.drafts and schedule.num_steps == 1
        are_left_r = np.any(filled_rw, axis=1).tolist()
        for bound, num_words, is_left in zip(rows, num_words_r, are_left_r, strict=True):
            failure, has_choice = bound.state.failure, num_words > 1 or not may_jump
            error = self._refused.get(bound.sequence) if failure is None else _too_much(failure)
            if error is None and has_choice and is_left and bound.is_plain:
                continue
            if not bound.sequence.is_live:  # another sequence has ended their request
                edits.mask_rw[bound.device_row] = -1
                continue
            if error is None and not has_choice and (token_ids := self._forced(bound.group, bound.sequence)):
                schedule.know_token(bound.entered)
                if output.append_forced_tokens(bound.group, bound.sequence, token_ids):
                    yield bound.group, bound.sequence, None
                continue
            if error is None and not (is_left and bound.is_plain):
                error = self._left(bound, sampling)
            if error is None:
                continue
            edits.mask_rw[bound.device_row] = -1  # its sample is discarded, and must be finite
            if bound.is_ahead:
                schedule.entered(bound.entered).cannot_sample()
            else:
                yield bound.group, bound.sequence, error

    def accept_tokens(
        self, sampled: SampledRows, output: OutputProcessor, continuing: Collection[Sequence] = ()
    ) -> Iterator[tuple[SequenceGroup, Sequence, JpagedError | None]]:
        """Advance grammars over the sampled tokens of a step; append forced tokens if no token is in flight.

        Sequences in `continuing` get no forced tokens, because their next token was sampled in the same step.

        Yields the sequences that end there, and those whose requests fail, with the error.
        """
        for group, sequence in zip(sampled.groups, sampled.sequences, strict=True):
            state = sequence.grammar
            if state is None or not sequence.is_live:
                continue
            if not state.accept(sequence.token_ids[-1]):
                yield group, sequence, _not_accepted(state, sequence.token_ids[-1])
            elif (
                sequence.num_in_flight_tokens == 0
                and sequence not in continuing
                and (token_ids := self._forced(group, sequence))
                and output.append_forced_tokens(group, sequence, token_ids)
            ):
                yield group, sequence, None

    def batch(self, rows: list[ConstrainedRow]) -> GrammarBatch:
        """Return the grammars of the rows of a masked dispatch."""
        return self._made.batch([bound.state for bound in rows], [bound.device_row for bound in rows])

    def accept_masked(self, rows: list[ConstrainedRow], batch: GrammarBatch, token_ids_r: I32) -> bool:
        """Advance grammars over the tokens of a masked step. Return False if a grammar rejects its token.

        The sequences get their tokens later, and then `fill_bitmasks` fails the request.
        """
        token_ids = token_ids_r[[bound.device_row for bound in rows]].tolist()
        refused = batch.accept(token_ids)
        for index in refused:
            bound = rows[index]
            self._refused[bound.sequence] = _not_accepted(bound.state, token_ids[index])
        return not refused

    def fill(self, rows: list[ConstrainedRow], batch: GrammarBatch, mask_rw: I32) -> bool:
        """Write the masks of the next masked step. Return False if a mask is empty or could not be computed.

        Rows that are not in `rows` keep their masks: they have ended, and their samples are discarded.
        """
        is_sound = batch.fill(mask_rw)
        num_words_r = np.count_nonzero(mask_rw[[bound.device_row for bound in rows]], axis=1)
        self.multi_step_policy.observe_forced_share(len(rows), int(np.count_nonzero(num_words_r == 1)))
        return is_sound and bool(num_words_r.all())

    def _forced(self, group: SequenceGroup, sequence: Sequence) -> list[int]:
        """Return the tokens that the grammar forces after the known ones, and advance the grammar over them.

        The result is empty if each token needs log-probabilities, counts or checks against other fields, or for the
        first token.
        """
        state, num_known = sequence.grammar, len(sequence.token_ids) - sequence.num_prompt_tokens
        if state is None or not group.may_jump or num_known == 0:
            return []
        token_ids = state.forced(group.request.sampling.max_num_tokens - num_known)
        for token_id in token_ids:
            if not state.accept(token_id):
                raise InternalError(f"the grammar does not accept its forced token {token_id}")
        if token_ids:
            self.decoding.remove(sequence)
        self._num_forced += len(token_ids)
        return token_ids

    def take_num_forced(self) -> int:
        """Return the number of tokens appended by jumps since the last call."""
        num_forced, self._num_forced = self._num_forced, 0
        return num_forced

    @property
    def _made(self) -> GrammarMasks:
        if self._masks is None:
            if self.make_masks is None:
                raise InternalError("a request has a grammar, but the engine cannot compute grammar masks")
            self._masks = self.make_masks()
        return self._masks

    def _filled(self, states: list[GrammarState]) -> I32:
        filled_rw = np.empty((len(states), num_mask_words(self.vocab_size)), np.int32)
        self._made.fill(states, filled_rw)
        return filled_rw

    def _left(self, bound: ConstrainedRow, sampling: SamplingInputs) -> JpagedError | None:
        """Return the error of a row if other fields of the request forbid every token; None if a token is left."""
        edits, sequence, params = sampling.edits, bound.sequence, bound.group.request.sampling
        if edits is None or edits.mask_rw is None:
            return None
        mask_w = edits.mask_rw[bound.device_row].copy()
        if not mask_w.any():
            name = "structured_outputs" if params.allowed_token_ids is None else "allowed_token_ids"
            return _nothing_left(name, sequence)
        if edits.singles_rx is not None:
            singles_x = edits.singles_rx[bound.device_row]
            is_meant_x = (singles_x["after"] == ANY_TOKEN) | (singles_x["after"] == sequence.token_ids[-1])
            _clear(mask_w, singles_x["ids"][is_meant_x & np.isneginf(singles_x["values"])])
            if not mask_w.any():
                return _nothing_left("bad_words", sequence)
        banned_x = sampling.rows_r["banned_token_ids_rx"][bound.device_row]
        _clear(mask_w, banned_x[banned_x != BEYOND_TOKENS])
        if not mask_w.any():  # min_tokens does not extend a text beyond its grammar
            banned_x[:] = BEYOND_TOKENS
        return None


def _clear(mask_w: I32, token_ids: I32) -> None:
    words = mask_w.view(np.uint32)
    known = token_ids[token_ids < len(words) * MASK_BITS]
    np.bitwise_and.at(words, known // MASK_BITS, ~(np.uint32(1) << (known % MASK_BITS).astype(np.uint32)))


def _not_accepted(state: GrammarState, token_id: int) -> JpagedError:
    if state.failure is not None:
        return _too_much(state.failure)
    return InternalError(f"token {token_id} was sampled, but the grammar does not allow it")


def _too_much(failure: str) -> JpagedError:
    return InvalidArgument("sampling.structured_outputs", f"the grammar exceeds the limit of a step: {failure}")


def _nothing_left(name: str, sequence: Sequence) -> JpagedError:
    number = len(sequence.token_ids) - sequence.num_prompt_tokens + 1
    problem = f"leaves no token that the grammar allows as output token {number}"
    return InvalidArgument(f"sampling.{name}", problem)
