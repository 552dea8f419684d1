"""What a step sampled -> the events that callers see. Exactly one event of a request is its last, and `close` sends it.

n sequences          each streams as it is sampled; the request ends with the last of them
                     where nobody reads along: nothing is sent until all have ended, and then each in one event
best_of above n      nothing is sent until all have ended; then the n likeliest, the best as index 0
beam_width           likewise: the n best finished beams
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jpaged.engine.executor import StepOutputs
from jpaged.engine.output.beam import Beam, BeamSearch
from jpaged.engine.sequence import Group, Sequence
from jpaged.engine.stats import DEADLINE, ERROR
from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import DeadlineExceeded
from jpaged.types import (
    FinishReason,
    OutputEvent,
    PositionLogprobs,
    SamplingParams,
    SequenceFinish,
    Usage,
)

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
        """Returns what is left of a character that was never completed."""
        return self._read(self._decode(self._window), len(self._window))

    def _read(self, text: str, end: int) -> str:
        """Returns what is new in the text of the window up to `end`."""
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


class OutputState:
    """Stop rules and text of one sequence: what it shows of itself, token by token.

    tokens    t0 t1 t2 | t3 t4          t3 t4 do not end on a whole character yet
                       ^ read
    text      "Once upon a ti" | "me."  "me." may still become the stop string "me.END"
                               ^ sent
    """

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

    def push(self, token_id: int) -> tuple[str, SequenceFinish | None]:
        """Takes the next token: (text that can be sent, how the sequence ended or None while it goes on).

        After the end nothing may be pushed.
        """
        self._num_tokens += 1
        is_stop_token = token_id in self._ending_ids
        # The text of the token that ends a sequence is not part of the answer, whether or not it is a special token.
        text = self._detokenizer.flush() if is_stop_token else self._detokenizer.push(token_id)
        if not is_stop_token and self._num_tokens >= self._sampling.max_tokens:
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

    def flush(self) -> str:
        """Text that was held back, for a sequence that ends between two tokens."""
        sent, matched = self._stop_strings.push(self._detokenizer.flush())
        return sent if matched is not None else sent + self._stop_strings.flush()


_MAX_TOKENS_PER_EVENT = 512
"""Tokens of an event at the end. With 20 top log-probabilities each they are 120 kB: 13 ms of the sending loop."""


@dataclass(slots=True)
class _Piece:
    """What there is to show of a sequence: one token's worth, or a part of what was held back."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish: SequenceFinish | None = None
    cumulative_logprob: float = 0.0


@dataclass(slots=True)
class _Held:
    """What is held back of a sequence, in columns: an entry a token, but for log-probabilities that nobody wants.

    Its text is that of its tokens joined; the last entry has what a sequence shows when it ends, too.
    """

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish: SequenceFinish | None = None
    cumulative_logprob: float = 0.0

    def parts(self) -> list[_Piece]:
        """All of it in parts of a bounded size, one at least, in time that grows with its length and not its square."""
        size = _MAX_TOKENS_PER_EVENT
        pieces = [self._part(slice(start, start + size)) for start in range(0, max(1, len(self.texts)), size)]
        pieces[-1].finish = self.finish
        return pieces

    def _part(self, part: slice) -> _Piece:
        return _Piece(
            text="".join(self.texts[part]),
            token_ids=tuple(self.token_ids[part]),
            logprobs=tuple(self.logprobs[part]),
            cumulative_logprob=self.cumulative_logprob,
        )


class OutputProcessor:
    """Owns the text side of every request in flight. Calls sinks; never touches blocks or the scheduler."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._states: dict[Sequence, OutputState] = {}
        self._held: dict[Group, dict[Sequence, _Held]] = {}
        self._searches: dict[Group, BeamSearch] = {}
        self._last_events: dict[Group, OutputEvent] = {}

    def open(self, group: Group) -> None:
        """Begins a request: no event is sent."""
        sampling = group.request.sampling
        if sampling.beam_width:
            self._searches[group] = BeamSearch(sampling, sampling.ending_ids(self._eos_token_ids))
            return
        for sequence in group.sequences:
            self._states[sequence] = self._new_state(group)
        if sampling.num_samples > sampling.n or group.request.is_whole:
            self._held[group] = {sequence: _Held() for sequence in group.sequences}

    def close(self, group: Group) -> None:
        """Forgets a request, which has been counted, and sends its last event if it has one."""
        for sequence in group.sequences:
            self._states.pop(sequence, None)
        self._held.pop(group, None)
        self._searches.pop(group, None)
        if (event := self._last_events.pop(group, None)) is not None:
            group.sink(event)

    def search(self, group: Group) -> BeamSearch:
        """The beam search of a request that asked for one."""
        return self._searches[group]

    def publish(self, group: Group, sequence: Sequence, outputs: StepOutputs, row: int) -> bool:
        """Appends the token that a row sampled and shows what it adds; True when the sequence ended with it."""
        token_id, sampling = outputs.token(row), group.request.sampling
        sequence.append(token_id, outputs.logprob(row) if sampling.needs_logprobs else 0.0)
        group.sampled(1)
        text, finish = self._states[sequence].push(token_id)
        num_top = sampling.logprobs
        logprobs = () if num_top is None else (outputs.position(row, num_top),)
        if group in self._held:
            held = self._held[group][sequence]
            held.token_ids.append(token_id)
            held.texts.append(text)
            held.logprobs.extend(logprobs)
            held.finish, held.cumulative_logprob = finish, sequence.cumulative_logprob
        else:
            ends_group = finish is not None and sum(other.is_live for other in group.sequences) == 1
            piece = _Piece(text, (token_id,), logprobs, finish, sequence.cumulative_logprob)
            self._show(group, sequence.index, piece, is_last=ends_group)
        return finish is not None

    def finish(self, group: Group) -> None:
        """Shows what was held back of a request whose sequences have all ended."""
        sampling = group.request.sampling
        told: list[_Held] = []
        if group in self._held:
            told = list(self._held[group].values())
            if sampling.num_samples > sampling.n:
                told = sorted(told, key=lambda held: -held.cumulative_logprob)[: sampling.n]
        elif group in self._searches:
            told = [self._tell(group, beam) for beam in self._searches[group].best(sampling.n)]
        self._show_held(group, told)

    def end(self, group: Group, reason: FinishReason) -> None:
        """Shows how a request ends between two tokens: an event for each sequence still going."""
        finish, sampling = SequenceFinish(reason), group.request.sampling
        if group in self._searches or sampling.num_samples > sampling.n:
            self._show(group, 0, _Piece(finish=finish), is_last=True)
            return
        if group in self._held:
            for sequence in group.live:
                held = self._held[group][sequence]
                held.texts[-1:] = ["".join(held.texts[-1:]) + self._states[sequence].flush()]
                held.finish = finish
            self._show_held(group, list(self._held[group].values()))
            return
        live = group.live
        for i, sequence in enumerate(live):
            text = self._states[sequence].flush()
            piece = _Piece(text, finish=finish, cumulative_logprob=sequence.cumulative_logprob)
            self._show(group, sequence.index, piece, is_last=i + 1 == len(live))

    def fail(self, group: Group, error: Exception) -> None:
        """Makes an error the last event of a request."""
        self._show(group, 0, _Piece(), is_last=True, error=error)

    def _new_state(self, group: Group) -> OutputState:
        request = group.request
        return OutputState(self._tokenizer, request.prompt_token_ids, request.sampling, self._eos_token_ids)

    def _tell(self, group: Group, beam: Beam) -> _Held:
        """A finished beam, as if its tokens had come one by one."""
        state, num_top = self._new_state(group), group.request.sampling.logprobs
        held = _Held(list(beam.token_ids), cumulative_logprob=beam.cumulative_logprob)
        for token_id in beam.token_ids:
            text, held.finish = state.push(token_id)
            held.texts.append(text)
        if num_top is not None:
            held.logprobs += [PositionLogprobs(one.chosen, one.top[:num_top]) for one in beam.logprobs]
        return held

    def _show_held(self, group: Group, told: list[_Held]) -> None:
        """Shows sequences that were held back, in the order of their indices; a request's last event is among them."""
        parts = [(index, part) for index, held in enumerate(told) for part in held.parts()]
        for number, (index, part) in enumerate(parts, start=1):
            self._show(group, index, part, is_last=number == len(parts))

    def _show(self, group: Group, index: int, piece: _Piece, *, is_last: bool, error: Exception | None = None) -> None:
        usage = Usage(
            prompt_tokens=len(group.request.prompt_token_ids),
            completion_tokens=group.num_sampled_tokens,
            cached_tokens=group.num_cached_tokens or 0,
        )
        event = OutputEvent(
            request_id=group.request.request_id,
            index=index,
            text=piece.text,
            token_ids=piece.token_ids,
            logprobs=piece.logprobs,
            finish=piece.finish,
            cumulative_logprob=piece.cumulative_logprob if group.request.sampling.needs_logprobs else None,
            usage=usage,
            is_last=is_last,
            error=error,
        )
        if is_last:
            failed = DEADLINE if isinstance(error, DeadlineExceeded) else ERROR
            group.ended(failed if piece.finish is None else piece.finish.reason.value)
            self._last_events[group] = event
        else:
            group.sink(event)
