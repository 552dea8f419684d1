"""What a step sampled -> the events that callers see. Exactly one event of a request is its last, and `close` sends it.

n sequences          each streams as it is sampled; the request ends with the last of them
                     where nobody reads along: nothing is sent until all have ended, and then each in one event
best_of above n      nothing is sent until all have ended; then the n likeliest, the best as index 0
beam_width           likewise: the n best finished beams
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from jpaged.engine.executor import BEYOND_TOKENS, I32, StepOutputs
from jpaged.engine.output.beam import Beam, BeamSearch
from jpaged.engine.output.text import Decoder, IncrementalDetokenizer, NoText, RememberedTexts
from jpaged.engine.output.told import Told
from jpaged.engine.scheduling.scheduled import Sampled
from jpaged.engine.sequence import Group, Sequence, collected_one_each
from jpaged.engine.stats import DEADLINE, ERROR
from jpaged.engine.tokenizer import NoTokenizer, Tokenizer
from jpaged.errors import DeadlineExceeded
from jpaged.types import (
    Continued,
    FinishReason,
    OutputEvent,
    PositionLogprobs,
    SamplingParams,
    SequenceFinish,
    TextState,
    Usage,
)


class StopStrings:
    """Holds text back while it may be the beginning of a stop string, so that none of one is sent unless asked for."""

    def __init__(self, stops: tuple[str, ...], *, sends_stop: bool = False) -> None:
        self._stops, self._sends_stop = stops, sends_stop
        self._held = ""

    @property
    def held(self) -> str:
        """Text that is held back."""
        return self._held

    def go_on(self, held: str) -> None:
        """Takes the place of one that holds a text back."""
        self._held = held

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that can be sent, the stop string that was completed or None)."""
        if not self._stops:
            return text, None
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda match: (match[0], -len(match[1])))
            sent, self._held = self._held[: at + len(stop) if self._sends_stop else at], ""
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


_MAX_TOKENS_PER_EVENT = 512
"""Tokens of an event at the end. With 20 top log-probabilities each they are 120 kB: 13 ms of the sending loop."""


@dataclass(slots=True)
class _Piece:
    """What there is to show of a sequence: one token's worth, or a part of what was held back."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish: SequenceFinish | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class Held:
    """What is held back of a sequence, in columns: an entry a token, where there is text and log-probabilities.

    Its text is that of its tokens joined; the last entry has what a sequence shows when it ends, too. The tokens are
    the sequence's own, which are read at the end.
    """

    texts: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish: SequenceFinish | None = None

    def add(self, text: str, logprobs: tuple[PositionLogprobs, ...], finish: SequenceFinish | None) -> None:
        """The next token has come."""
        self.texts.append(text)
        self.logprobs += logprobs
        self.finish = finish

    def parts(self, token_ids: SequenceOf[int], cumulative_logprob: float | None) -> list[_Piece]:
        """All of it in parts of a bounded size, one at least, in time that grows with its length and not its square."""
        size = _MAX_TOKENS_PER_EVENT
        pieces = []
        for start in range(0, max(1, len(token_ids)), size):
            part = slice(start, start + size)
            text, logprobs = "".join(self.texts[part]), tuple(self.logprobs[part])
            piece = _Piece(text, tuple(token_ids[part]), logprobs, cumulative_logprob=cumulative_logprob)
            pieces.append(piece)
        pieces[-1].finish = self.finish
        return pieces


class OutputState:
    """Stop rules and text of one sequence: what it shows of itself, token by token.

    tokens    t0 t1 t2 | t3 t4          t3 t4 do not end on a whole character yet
                       ^ read
    text      "Once upon a ti" | "me."  "me." may still become the stop string "me.END"
                               ^ sent

    Attributes:
        has_text: there is a tokenizer, and somebody wants text.
        needs_logprobs: of its sampling parameters, as `num_top` is their `logprobs`.
        asks_more: of them, too.
        held: what is held back of it; None where it is sent as it comes.
    """

    def __init__(
        self,
        tokenizer: Decoder | None,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.has_text = False
        self.needs_logprobs = sampling.needs_logprobs
        self.num_top = sampling.logprobs
        self.asks_more = sampling.asks_more_of_samples
        self.held: Held | None = None
        self._detokenizer: IncrementalDetokenizer | NoText = NoText()
        if tokenizer is not None and sampling.detokenize:
            self.has_text = True
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens
            )
        self._stop_strings = StopStrings(tuple(sampling.stop), sends_stop=sampling.include_stop_str_in_output)
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._ending_ids = sampling.ending_ids(eos_token_ids)
        self._sampling = sampling
        self._num_tokens = 0

    def hold(self) -> None:
        """Nothing of it is sent before the end."""
        self.held = Held()

    def go_on(self, continued: Continued) -> None:
        """Takes the place of one that took the tokens that a sequence has generated elsewhere."""
        self._num_tokens = len(continued.generated.token_ids)
        self._detokenizer.go_on(continued.text)
        self._stop_strings.go_on(continued.text.held)

    @property
    def text(self) -> TextState:
        """Where its text is behind the tokens that it has."""
        return self._detokenizer.state(self._stop_strings.held)

    def passed(self) -> tuple[str, SequenceFinish | None]:
        """Takes a token that ends nothing, where there is no text: as `push` does."""
        self._num_tokens += 1
        return "", None

    def push(self, token_id: int) -> tuple[str, SequenceFinish | None]:
        """Takes the next token: (text that can be sent, how the sequence ended or None while it goes on).

        After the end nothing may be pushed.
        """
        self._num_tokens += 1
        is_stop_token = token_id in self._ending_ids
        # The text of the token that ends a sequence is not part of the answer, whether or not it is a special token.
        is_left_out = is_stop_token and not self._sampling.include_stop_str_in_output
        text = self._detokenizer.flush() if is_left_out else self._detokenizer.push(token_id)
        if not is_left_out and (is_stop_token or self._num_tokens >= self._sampling.max_tokens):
            text += self._detokenizer.flush()
        if self._num_tokens < self._sampling.min_tokens:
            return text, None
        sent, matched = self._stop_strings.push(text)
        if matched is not None:
            return sent, SequenceFinish(FinishReason.STOP, matched)
        if is_stop_token:
            is_named = token_id in self._stop_token_ids
            finish = SequenceFinish(FinishReason.STOP, token_id if is_named else None)
            return sent + self._stop_strings.flush(), finish
        if self._num_tokens >= self._sampling.max_tokens:
            return sent + self._stop_strings.flush(), SequenceFinish(FinishReason.LENGTH)
        return sent, None

    def end(self, finish: SequenceFinish) -> None:
        """Ends what is held back between two tokens."""
        if self.held is not None:
            self.held.texts[-1:] = ["".join(self.held.texts[-1:]) + self.flush()]
            self.held.finish = finish

    def flush(self) -> str:
        """Text that was held back, for a sequence that ends between two tokens."""
        sent, matched = self._stop_strings.push(self._detokenizer.flush())
        return sent if matched is not None else sent + self._stop_strings.flush()


class _EndingIds:
    """The tokens that end some sequence in flight, for a look at all rows of a step at once."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.any: I32 = np.zeros(0, np.int32)

    def add(self, token_ids: Iterable[int]) -> None:
        """A request has come that these end."""
        num_before = len(self._counts)
        self._counts.update(token_ids)
        if len(self._counts) != num_before:
            self._gather()

    def discard(self, token_ids: Iterable[int]) -> None:
        """A request is gone that these ended."""
        self._counts.subtract(token_ids)
        if gone := [token_id for token_id in token_ids if not self._counts[token_id]]:
            for token_id in gone:
                del self._counts[token_id]
            self._gather()

    def _gather(self) -> None:
        self.any = np.array([token_id for token_id in self._counts if token_id < BEYOND_TOKENS], np.int32)


class OutputProcessor:
    """Owns the text side of every request in flight. Calls sinks; never touches blocks or the scheduler.

    Attributes:
        told: what is shown of prompts, and of samples besides tokens.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> None:
        self._texts = None if isinstance(tokenizer, NoTokenizer) else RememberedTexts(tokenizer)
        self._eos_token_ids = eos_token_ids
        self._ending_ids = _EndingIds()
        self._states: dict[Sequence, OutputState] = {}
        self._searches: dict[Group, BeamSearch] = {}
        self._last_events: dict[Group, OutputEvent] = {}
        self.told = Told()

    def open(self, group: Group) -> None:
        """Begins a request: no event is sent."""
        sampling = group.request.sampling
        ending_ids = sampling.ending_ids(self._eos_token_ids)
        if sampling.beam_width:
            self._searches[group] = BeamSearch(sampling, ending_ids)
            return
        self._ending_ids.add(ending_ids)
        for sequence in group.live:
            state = self._states[sequence] = self._new_state(group)
            if not group.is_streamed:
                state.hold()
        for continued in group.request.continued:
            if not continued.generated.has_finished:
                self._states[group.sequences[continued.generated.index]].go_on(continued)

    def close(self, group: Group) -> None:
        """Forgets a request, which has been counted, and sends its last event if it has one."""
        if any(sequence in self._states for sequence in group.sequences):
            self._ending_ids.discard(group.request.sampling.ending_ids(self._eos_token_ids))
        for sequence in group.sequences:
            self._states.pop(sequence, None)
        self._searches.pop(group, None)
        self.told.forget(group)
        if (event := self._last_events.pop(group, None)) is not None:
            group.sink(event)

    def search(self, group: Group) -> BeamSearch:
        """The beam search of a request that asked for one."""
        return self._searches[group]

    def publish(self, sampled: Sampled, outputs: StepOutputs) -> Iterator[tuple[Group, Sequence]]:
        """Appends the tokens of a step and shows what they add, row by row; yields the sequences that end with theirs.

        Whoever iterates ends a sequence before asking for the next one.
        """
        if not sampled.rows:
            return
        token_ids = outputs.token_ids_rn[sampled.rows, 0]
        may_end = np.isin(token_ids, self._ending_ids.any) | sampled.are_last
        tokens, sums = token_ids.tolist(), outputs.logprobs_rn
        # A step that tells of no log-probabilities has no row that needs them.
        logprobs = [0.0] * len(tokens) if sums is None else sums[sampled.rows, 0].tolist()
        collected_one_each(sampled.sequences, tokens, logprobs)
        columns = zip(sampled.rows, sampled.groups, sampled.sequences, tokens, may_end.tolist(), strict=True)
        for row, group, sequence, token_id, is_checked in columns:
            group.sampled(1)
            state = self._states[sequence]
            text, finish = state.push(token_id) if is_checked or state.has_text else state.passed()
            positions = () if state.num_top is None else (outputs.position(row, max(0, state.num_top)),)
            if state.asks_more:
                positions = (self.told.position(row, outputs, group.request.sampling),)
            if self.told.ready and group in self.told.ready and state.held is None:
                self._show_told(group)
            told_sum = sequence.cumulative_logprob if state.needs_logprobs else None
            if state.held is not None:
                state.held.add(text, positions, finish)
            elif finish is None:
                # By place and without a piece: what most tokens come to is made in a microsecond.
                group.sink(
                    OutputEvent(
                        group.request.request_id,
                        sequence.index,
                        text,
                        (token_id,),
                        positions,
                        None,
                        told_sum,
                        _usage(group),
                    )
                )
            else:
                piece = _Piece(text, (token_id,), positions, finish, told_sum)
                self._show(group, sequence.index, piece, is_last=len(group.live) == 1)
            if finish is not None:
                yield group, sequence

    def jump(self, group: Group, sequence: Sequence, token_ids: list[int]) -> bool:
        """Appends tokens that were not sampled, up to one that ends the sequence, as one event; True where one does."""
        state, texts, finish, num_taken = self._states[sequence], list[str](), None, 0
        for token_id in token_ids:
            text, finish = state.push(token_id)
            num_taken += 1
            texts.append(text)
            if state.held is not None:
                state.held.add(text, (), finish)
            if finish is not None:
                break
        sequence.jump(token_ids[:num_taken])
        group.sampled(num_taken)
        if state.held is None:
            piece = _Piece("".join(texts), tuple(token_ids[:num_taken]), finish=finish)
            self._show(group, sequence.index, piece, is_last=finish is not None and len(group.live) == 1)
        return finish is not None

    def finish(self, group: Group) -> None:
        """Shows what was held back of a request whose sequences have all ended."""
        sampling = group.request.sampling
        if group in self._searches:
            self._show_parts(group, [self._tell(group, beam) for beam in self._searches[group].best(sampling.n)])
            return
        told = group.sequences
        if sampling.num_samples > sampling.n:
            told = sorted(told, key=lambda sequence: -sequence.cumulative_logprob)[: sampling.n]
        self._show_parts(group, [self._parts(sequence) for sequence in told])

    def end(self, group: Group, reason: FinishReason) -> None:
        """Shows how a request ends between two tokens: an event for each sequence still going."""
        finish, sampling = SequenceFinish(reason), group.request.sampling
        if group in self._searches or sampling.num_samples > sampling.n:
            self._show(group, 0, _Piece(finish=finish), is_last=True)
            return
        live = group.live
        if group.request.is_whole:
            for sequence in live:
                self._states[sequence].end(finish)
            self._show_parts(group, [self._parts(sequence) for sequence in group.sequences])
            return
        for i, sequence in enumerate(live):
            text = self._states[sequence].flush()
            piece = _Piece(text, finish=finish, cumulative_logprob=self._told_sum(sequence))
            self._show(group, sequence.index, piece, is_last=i + 1 == len(live))

    def fail(self, group: Group, error: Exception) -> None:
        """Makes an error the last event of a request."""
        self._show(group, 0, _Piece(), is_last=True, error=error)

    def _new_state(self, group: Group) -> OutputState:
        request = group.request
        return OutputState(self._texts, request.prompt_token_ids, request.sampling, self._eos_token_ids)

    def _tell(self, group: Group, beam: Beam) -> list[_Piece]:
        """A finished beam, as if its tokens had come one by one."""
        state, num_top, held = self._new_state(group), group.request.sampling.logprobs, Held()
        for token_id in beam.token_ids:
            text, held.finish = state.push(token_id)
            held.texts.append(text)
        if num_top is not None:
            held.logprobs += [PositionLogprobs(one.chosen, one.top[:num_top]) for one in beam.logprobs]
        return held.parts(beam.token_ids, beam.cumulative_logprob)

    def _parts(self, sequence: Sequence) -> list[_Piece]:
        """A sequence that was held back; none of one that was sent as it came, or that has ended elsewhere."""
        state = self._states.get(sequence)
        if state is None or state.held is None:
            return []
        return state.held.parts(sequence.token_ids[sequence.num_given_tokens :], self._told_sum(sequence))

    def _told_sum(self, sequence: Sequence) -> float | None:
        return sequence.cumulative_logprob if self._states[sequence].needs_logprobs else None

    def _show_parts(self, group: Group, told: list[list[_Piece]]) -> None:
        """Shows sequences that were held back, in the order of their indices; a request's last event is among them."""
        parts = [(index, part) for index, pieces in enumerate(told) for part in pieces]
        for number, (index, part) in enumerate(parts, start=1):
            self._show(group, index, part, is_last=number == len(parts))

    def _show_told(self, group: Group) -> None:
        """Shows what was told of a prompt, in events of a bounded size."""
        told, request_id = self.told.ready.pop(group), group.request.request_id
        for begin in range(0, max(1, len(told.logprobs)), _MAX_TOKENS_PER_EVENT):
            part = tuple(told.logprobs[begin : begin + _MAX_TOKENS_PER_EVENT])
            embedding = told.embedding if not begin else ()
            group.sink(OutputEvent(request_id, usage=_usage(group), prompt_logprobs=part, embedding=embedding))

    def _usage_of(self, group: Group) -> Usage:
        """Return the usage of a request; a search counts the tokens of the beams that it returns."""
        usage, search = _usage(group), self._searches.get(group)
        if search is None:
            return usage
        beams = search.best(group.request.sampling.n) if search.is_done else []
        return dataclasses.replace(usage, completion_tokens=sum(len(beam.token_ids) for beam in beams))

    def _show(self, group: Group, index: int, piece: _Piece, *, is_last: bool, error: Exception | None = None) -> None:
        if group in self.told.ready and error is None:
            self._show_told(group)
        event = OutputEvent(
            request_id=group.request.request_id,
            index=index,
            text=piece.text,
            token_ids=piece.token_ids,
            logprobs=piece.logprobs,
            finish=piece.finish,
            cumulative_logprob=piece.cumulative_logprob,
            usage=self._usage_of(group),
            is_last=is_last,
            times=group.times if is_last else None,
            error=error,
        )
        if is_last:
            failed = DEADLINE if isinstance(error, DeadlineExceeded) else ERROR
            group.ended(failed if piece.finish is None else piece.finish.reason.value)
            self._last_events[group] = event
        else:
            group.sink(event)


def _usage(group: Group) -> Usage:
    return Usage(len(group.request.prompt_token_ids), group.num_sampled_tokens, group.num_cached_tokens or 0)
