"""Output events of sampled tokens. Exactly one event of a request is its last, and `close` sends it.

n sequences          each streams as it is sampled; the request ends with the last of them
                     non-streaming: nothing is sent until all have ended, and then each in one event
best_of above n      nothing is sent until all have ended; then the n likeliest, the best as index 0
beam_width           likewise: the n best finished beams

Aux outputs of prompts and samples, until they are sent.

Incremental detokenization: each character is sent once and whole, at constant cost per token.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import BEYOND_TOKENS, I32, StepOutputs
from jpaged.engine.executor.aux_io import AuxOutputs, Truncation, compute_entropy
from jpaged.engine.executor.verbs import RoutedExperts
from jpaged.engine.output.beam import Beam, BeamSearch
from jpaged.engine.scheduler.output import AuxRequest, SampledRows, StepAux
from jpaged.engine.sequence import Sequence, SequenceGroup, collected_one_each
from jpaged.engine.stats import DEADLINE, ERROR
from jpaged.engine.tokenizer import NoTokenizer, Tokenizer
from jpaged.errors import DeadlineExceeded
from jpaged.types import (
    FinishReason,
    OutputEvent,
    PositionLogprobs,
    ResumedSequence,
    SamplingParams,
    SequenceFinish,
    TextState,
    TokenLogprob,
    Usage,
    WeightVersionRun,
)

_REPLACEMENT = "\ufffd"
_MAX_CHARACTER_TOKENS = 4
"""A UTF-8 character has at most four bytes, so at most four byte tokens form one."""
_CONTEXT_TOKENS = 4
"""Tokens of the prompt decoded along with the first output, because tokenizers strip a leading space."""


_MAX_REMEMBERED = 1 << 16
"""Maximum number of cached texts: 10 MB."""


class Decoder(Protocol):
    """Tokenizer interface used here."""

    def decode(self, token_ids: SequenceOf[int], *, skip_special_tokens: bool = True) -> str: ...


_MAX_EXPERT_BYTES = 4 << 20
"""Maximum bytes of the experts in an event."""


class RememberedTexts:
    """Tokenizer wrapper that caches the texts of one and two tokens.

    Each token of a sequence needs two decodes: the token with the one before it, and the token alone as the context of
    the next. Both recur soon, in this sequence or another; a cache hit takes a tenth of the tokenizer's time.

    Attributes:
        transitions: by `skip_special_tokens`, the transitions of detokenizers that have occurred: from the last token
            and the next one to the text to send and the text of the next token alone.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[bool, dict[tuple[int, ...], str]] = {False: {}, True: {}}
        self.transitions: dict[bool, dict[tuple[int, int], tuple[str, str]]] = {False: {}, True: {}}

    def decode(self, token_ids: SequenceOf[int], *, skip_special_tokens: bool = True) -> str:
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
        self._transitions: dict[tuple[int, int], tuple[str, str]] = {}
        if isinstance(tokenizer, RememberedTexts):
            self._transitions = tokenizer.transitions[skip_special_tokens]

    def go_on(self, state: TextState) -> None:
        """Restore a state from another detokenizer."""
        self._window, self._num_read, self._text_read = list(state.window), state.num_read, state.text_read

    def state(self, held: str) -> TextState:
        """Return the current state, with the text that the caller withholds."""
        return TextState(tuple(self._window), self._num_read, self._text_read, held)

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes."""
        window = self._window
        if len(window) != 1 or self._num_read != 1:
            return self._push(token_id)
        key = window[0], token_id  # the text read is that of the only token, so they decide everything
        transition = self._transitions.get(key)
        if transition is not None:
            window[0] = token_id
            text, self._text_read = transition
            return text
        text = self._push(token_id)
        if self._num_read == 1 and self._window == [token_id]:
            if len(self._transitions) >= _MAX_REMEMBERED:
                self._transitions.clear()
            self._transitions[key] = text, self._text_read
        return text

    def _push(self, token_id: int) -> str:
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


@dataclass(slots=True)
class _PromptResults:
    """Accumulated log-probabilities of a prompt, or its hidden states: their sum, or all `[T, E]`."""

    logprobs: list[PositionLogprobs] = field(default_factory=list)
    sum_e: NDArray[np.float64] | None = None
    num_summed: int = 0
    all_te: NDArray[np.float32] | None = None

    def add(self, request: AuxRequest, outputs: AuxOutputs, row: int) -> None:
        """Add the next position."""
        if outputs.hidden_re is not None and request.group.request.pooling == "all":
            assert request.position is not None
            if self.all_te is None:
                num_tokens = len(request.group.request.prompt_token_ids)
                self.all_te = np.empty((num_tokens, outputs.hidden_re.shape[1]), np.float32)
            self.all_te[request.position] = outputs.hidden_re[row]
            return
        if outputs.hidden_re is not None:
            hidden_e = outputs.hidden_re[row].astype(np.float64)
            self.sum_e = hidden_e if self.sum_e is None else self.sum_e + hidden_e
            self.num_summed += 1
            return
        assert request.position is not None
        token_id = request.sequence.token_ids[request.position + 1]
        num_top = request.group.request.sampling.prompt_logprobs or 0
        self.logprobs.append(PositionLogprobs(outputs.chosen(row, token_id), outputs.top(row, num_top)))

    @property
    def embedding(self) -> tuple[float, ...] | memoryview:
        """Return the mean of the hidden states, in float32, or a view of all of them."""
        if self.all_te is not None:
            return self.all_te.reshape(-1).data.toreadonly()
        if self.sum_e is None:
            return ()
        mean: list[float] = (self.sum_e / self.num_summed).astype(np.float32).tolist()
        return tuple(mean)


class AuxOutputCollector:
    """Collector of aux outputs of requests in flight.

    Attributes:
        ready: groups whose prompt outputs are complete, and not yet sent.
    """

    def __init__(self) -> None:
        self.ready: dict[SequenceGroup, _PromptResults] = {}
        self._prompts: dict[SequenceGroup, _PromptResults] = {}
        self._samples: dict[int, tuple[AuxOutputs, int]] = {}

    def take(self, results: Iterable[tuple[StepAux, AuxOutputs]]) -> None:
        """Add all aux outputs of a step."""
        self._samples.clear()
        for aux, outputs in results:
            for row, request in enumerate(aux.requests):
                if request.position is None:
                    self._samples[request.row] = outputs, row
                elif request.sequence.is_live:
                    found = self._prompts.setdefault(request.group, _PromptResults())
                    found.add(request, outputs, row)
                    if request.position + 1 == request.sequence.prompt_logprobs_end:
                        self.ready[request.group] = self._prompts.pop(request.group)

    def discard(self, group: SequenceGroup) -> None:
        """Remove what was collected for a request."""
        self._prompts.pop(group, None)
        self.ready.pop(group, None)

    def position(self, row: int, outputs: StepOutputs, sampling: SamplingParams) -> PositionLogprobs:
        """Return the log-probabilities of a row's sample, for a request that needs aux outputs."""
        aux, aux_row = self._samples[row]
        token_id = outputs.token(row)
        if sampling.sampling_logprobs:
            return self._sampled_position(row, token_id, sampling)
        if not sampling.logprob_token_ids:
            return PositionLogprobs(aux.chosen(aux_row, token_id), aux.top(aux_row, sampling.logprobs or 0))
        assert aux.logprobs_rk is not None
        values = aux.logprobs_rk[aux_row, 1 : 1 + len(sampling.logprob_token_ids)].tolist()
        pairs = zip(sampling.logprob_token_ids, values, strict=True)
        requested = tuple(TokenLogprob(token_id, value) for token_id, value in pairs)
        return PositionLogprobs(outputs.position(row, 0).chosen, asked=requested)

    def _sampled_position(self, row: int, token_id: int, sampling: SamplingParams) -> PositionLogprobs:
        """Return all values from the aux outputs: those of the prompt's tokens have the same bits."""
        aux, aux_row = self._samples[row]
        assert aux.all_logprobs_rv is not None
        logprobs_v, chosen = aux.all_logprobs_rv[aux_row], aux.chosen(aux_row, token_id)
        asked = [TokenLogprob(token_id, logprobs_v.item(token_id)) for token_id in sampling.logprob_token_ids]
        truncation = Truncation(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        return PositionLogprobs(
            chosen,
            aux.top(aux_row, sampling.logprobs or 0),
            tuple(asked),
            chosen.logprob if truncation.is_neutral else truncation.compute_logprob(logprobs_v, token_id),
            compute_entropy(logprobs_v),
        )


class StopStrings:
    """Buffer of text that may be the beginning of a stop string, so that no part of one is sent unless requested."""

    def __init__(self, stops: tuple[str, ...], *, sends_stop: bool = False) -> None:
        self._stops, self._sends_stop = stops, sends_stop
        self._held = ""

    @property
    def held(self) -> str:
        """Return the withheld text."""
        return self._held

    def go_on(self, held: str) -> None:
        """Restore the withheld text of a sequence that started elsewhere."""
        self._held = held

    def push(self, text: str) -> tuple[str, str | None]:
        """Return (text to send, the completed stop string or None)."""
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
        """Return and clear the withheld text, after the sequence ended without a stop string."""
        sent, self._held = self._held, ""
        return sent

    def _num_held_back(self) -> int:
        """Return the length of the longest suffix of the text that is a prefix of a stop string."""
        longest = min(len(self._held), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


_MAX_TOKENS_PER_EVENT = 512
"""Maximum tokens of an event at the end. With 20 top log-probabilities each these are 120 kB: 13 ms of event loop."""


@dataclass(slots=True)
class _OutputPart:
    """Part of a sequence to send: one token, or a part of the withheld output."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish: SequenceFinish | None = None
    cumulative_logprob: float | None = None
    versions: tuple[WeightVersionRun, ...] = ()
    routed_experts: NDArray[Any] | None = None


@dataclass(slots=True)
class WithheldOutput:
    """Withheld output of a sequence, in columns: one entry per token for texts and log-probabilities.

    The text is that of the tokens joined; the last entry includes the text flushed at the end. The token ids are read
    from the sequence at the end.
    """

    texts: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish: SequenceFinish | None = None
    routed_experts: NDArray[Any] | None = None

    def add(self, text: str, logprobs: tuple[PositionLogprobs, ...], finish: SequenceFinish | None) -> None:
        """Append the next token."""
        self.texts.append(text)
        self.logprobs += logprobs
        self.finish = finish

    def parts(
        self, token_ids: SequenceOf[int], cumulative_logprob: float | None, versions: tuple[WeightVersionRun, ...]
    ) -> list[_OutputPart]:
        """Split the output into parts of bounded size, at least one, in linear time."""
        size = _MAX_TOKENS_PER_EVENT
        pieces = []
        for start in range(0, max(1, len(token_ids)), size):
            part = slice(start, start + size)
            text, logprobs = "".join(self.texts[part]), tuple(self.logprobs[part])
            piece = _OutputPart(text, tuple(token_ids[part]), logprobs, cumulative_logprob=cumulative_logprob)
            pieces.append(piece)
        pieces[-1].finish, pieces[-1].versions = self.finish, versions
        pieces[-1].routed_experts = self.routed_experts
        return pieces


class OutputState:
    """Stop rules and text of one sequence, token by token.

    tokens    t0 t1 t2 | t3 t4          t3 t4 do not end on a whole character yet
                       ^ read
    text      "Once upon a ti" | "me."  "me." may still become the stop string "me.END"
                               ^ sent

    Attributes:
        has_text: there is a tokenizer, and the request wants text.
        needs_logprobs: from the sampling parameters, as are `num_top` (`logprobs`) and `needs_aux_outputs`.
        needs_aux_outputs: the request needs aux outputs for sampled tokens.
        held: withheld output; None if it is streamed.
        kept_experts: experts of the tokens until the last preemption; None before one.
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
        self.needs_aux_outputs = sampling.needs_extra_logprobs
        self.held: WithheldOutput | None = None
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
        self.kept_experts: NDArray[Any] | None = None

    def hold(self) -> None:
        """Withhold all output until the end."""
        self.held = WithheldOutput()

    def go_on(self, continued: ResumedSequence) -> None:
        """Restore the state of a sequence after the tokens that it generated elsewhere."""
        self._num_tokens = len(continued.generated.token_ids)
        self._detokenizer.go_on(continued.text)
        self._stop_strings.go_on(continued.text.held)

    @property
    def text(self) -> TextState:
        """Return the state of the text after the tokens so far."""
        return self._detokenizer.state(self._stop_strings.held)

    def passed(self) -> tuple[str, SequenceFinish | None]:
        """Record a token that cannot end the sequence, without text; returns what `push` would."""
        self._num_tokens += 1
        return "", None

    def push(self, token_id: int) -> tuple[str, SequenceFinish | None]:
        """Append a token; return (text to send, how the sequence ended or None).

        After the end no token may be pushed.
        """
        self._num_tokens += 1
        is_stop_token = token_id in self._ending_ids
        # The text of the token that ends a sequence is not part of the answer, whether or not it is a special token.
        is_left_out = is_stop_token and not self._sampling.include_stop_str_in_output
        text = self._detokenizer.flush() if is_left_out else self._detokenizer.push(token_id)
        if not is_left_out and (is_stop_token or self._num_tokens >= self._sampling.max_num_tokens):
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
        if self._num_tokens >= self._sampling.max_num_tokens:
            return sent + self._stop_strings.flush(), SequenceFinish(FinishReason.LENGTH)
        return sent, None

    def end(self, finish: SequenceFinish, routed_experts: NDArray[Any] | None) -> None:
        """End the withheld output between two tokens."""
        if self.held is not None:
            self.held.texts[-1:] = ["".join(self.held.texts[-1:]) + self.flush()]
            self.held.finish, self.held.routed_experts = finish, routed_experts

    def flush(self) -> str:
        """Return the withheld text of a sequence that ends between two tokens."""
        sent, matched = self._stop_strings.push(self._detokenizer.flush())
        return sent if matched is not None else sent + self._stop_strings.flush()


class _EndingIds:
    """Union of the tokens that end sequences in flight, to test all rows of a step at once."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.any: I32 = np.zeros(0, np.int32)

    def add(self, token_ids: Iterable[int]) -> None:
        """Add the ending tokens of a new request."""
        num_before = len(self._counts)
        self._counts.update(token_ids)
        if len(self._counts) != num_before:
            self._gather()

    def discard(self, token_ids: Iterable[int]) -> None:
        """Remove the ending tokens of a finished request."""
        self._counts.subtract(token_ids)
        if gone := [token_id for token_id in token_ids if not self._counts[token_id]]:
            for token_id in gone:
                del self._counts[token_id]
            self._gather()

    def _gather(self) -> None:
        self.any = np.array([token_id for token_id in self._counts if token_id < BEYOND_TOKENS], np.int32)


class OutputProcessor:
    """Text output of all requests in flight. It calls sinks, and never touches blocks or the scheduler.

    Attributes:
        prompt_logprobs: aux outputs of prompts and samples.
        weight_version: of the weights that sample tokens.

    Args:
        routed_experts: reads the experts of tokens; None if they are not returned.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: frozenset[int], routed_experts: RoutedExperts | None = None
    ) -> None:
        self._routed_experts = routed_experts
        self._texts = None if isinstance(tokenizer, NoTokenizer) else RememberedTexts(tokenizer)
        self._eos_token_ids = eos_token_ids
        self._ending_ids = _EndingIds()
        self._states: dict[Sequence, OutputState] = {}
        self._searches: dict[SequenceGroup, BeamSearch] = {}
        self._last_events: dict[SequenceGroup, OutputEvent] = {}
        self.aux_outputs = AuxOutputCollector()
        self.weight_version = "0"

    def set_weight_version(self, version: str) -> None:
        """Set the version of the weights that sample tokens from now on."""
        self.weight_version = version

    def open(self, group: SequenceGroup) -> None:
        """Start a request; no event is sent."""
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

    def close(self, group: SequenceGroup) -> None:
        """Remove a request after it was counted, and send its last event if there is one."""
        if any(sequence in self._states for sequence in group.sequences):
            self._ending_ids.discard(group.request.sampling.ending_ids(self._eos_token_ids))
        for sequence in group.sequences:
            self._states.pop(sequence, None)
        self._searches.pop(group, None)
        self.aux_outputs.discard(group)
        if (event := self._last_events.pop(group, None)) is not None:
            group.sink(event)

    def restart_prompt(self, group: SequenceGroup) -> None:
        """Compute aux outputs of a prompt again with other weights; no-op after its first token."""
        if not group.num_sampled_tokens:
            self.aux_outputs.discard(group)
            group.restart_prompt()

    def search(self, group: SequenceGroup) -> BeamSearch:
        """Return the beam search of a request."""
        return self._searches[group]

    def publish(self, sampled: SampledRows, outputs: StepOutputs) -> Iterator[tuple[SequenceGroup, Sequence]]:
        """Append the tokens of a step and send events row by row; yield the sequences that ended.

        The caller must end each yielded sequence before it continues the iteration.
        """
        if not sampled.rows:
            return
        token_ids = outputs.token_ids_rn[sampled.rows, 0]
        may_end = np.isin(token_ids, self._ending_ids.any) | sampled.are_last
        tokens, sums = token_ids.tolist(), outputs.logprobs_rn
        # A step without log-probabilities has no row that needs them.
        logprobs = [0.0] * len(tokens) if sums is None else sums[sampled.rows, 0].tolist()
        collected_one_each(sampled.sequences, tokens, logprobs)
        columns = zip(sampled.rows, sampled.groups, sampled.sequences, tokens, may_end.tolist(), strict=True)
        for row, group, sequence, token_id, is_checked in columns:
            group.sampled(1)
            state = self._states[sequence]
            text, finish = state.push(token_id) if is_checked or state.has_text else state.passed()
            positions = () if state.num_top is None else (outputs.position(row, max(0, state.num_top)),)
            if state.needs_aux_outputs:
                positions = (self.aux_outputs.position(row, outputs, group.request.sampling),)
            if self.aux_outputs.ready and group in self.aux_outputs.ready and state.held is None:
                self._send_prompt_results(group)
            reported_sum = sequence.cumulative_logprob if state.needs_logprobs else None
            if state.held is not None:
                state.held.add(text, positions, finish)
                if finish is not None:
                    state.held.routed_experts = self._read_experts(group, sequence)
            elif finish is None:
                # Positional arguments and no _Piece: the common case takes a microsecond.
                group.sink(
                    OutputEvent(
                        group.request.request_id,
                        sequence.index,
                        text,
                        (token_id,),
                        positions,
                        None,
                        reported_sum,
                        _usage(group),
                    )
                )
            else:
                versions = sequence.count_versions(self.weight_version)
                experts = self._read_experts(group, sequence)
                piece = _OutputPart(text, (token_id,), positions, finish, reported_sum, versions, experts)
                self._show(group, sequence.index, piece, is_last=len(group.live) == 1)
            if finish is not None:
                yield group, sequence

    def append_forced_tokens(self, group: SequenceGroup, sequence: Sequence, token_ids: list[int]) -> bool:
        """Append tokens forced by the grammar as one event, up to an ending one; return True if there was one."""
        state, texts, finish, num_taken = self._states[sequence], list[str](), None, 0
        for token_id in token_ids:
            text, finish = state.push(token_id)
            num_taken += 1
            texts.append(text)
            if state.held is not None:
                state.held.add(text, (), finish)
            if finish is not None:
                break
        sequence.append_forced(token_ids[:num_taken])
        group.sampled(num_taken)
        experts = None if finish is None else self._read_experts(group, sequence)
        if state.held is not None:
            state.held.routed_experts = experts
        else:
            piece = _OutputPart("".join(texts), tuple(token_ids[:num_taken]), finish=finish, routed_experts=experts)
            piece.versions = () if finish is None else sequence.count_versions(self.weight_version)
            self._show(group, sequence.index, piece, is_last=finish is not None and len(group.live) == 1)
        return finish is not None

    def finish(self, group: SequenceGroup) -> None:
        """Send the withheld output of a request whose sequences have all ended."""
        sampling = group.request.sampling
        if group in self._searches:
            self._show_parts(group, [self._get_parts(group, beam) for beam in self._searches[group].best(sampling.n)])
            return
        reported = group.sequences
        if sampling.num_samples > sampling.n:
            reported = sorted(reported, key=lambda sequence: -sequence.cumulative_logprob)[: sampling.n]
        self._show_parts(group, [self._parts(group, sequence) for sequence in reported])

    def end(self, group: SequenceGroup, reason: FinishReason) -> None:
        """Send the end of a request between two tokens: one event for each live sequence."""
        finish, sampling = SequenceFinish(reason), group.request.sampling
        if group in self._searches or sampling.num_samples > sampling.n:
            versions = group.sequences[0].count_versions(self.weight_version, 0)
            self._show(group, 0, _OutputPart(finish=finish, versions=versions), is_last=True)
            return
        live = group.live
        if group.request.is_non_streaming:
            for sequence in live:
                self._states[sequence].end(finish, self._read_experts(group, sequence))
            self._show_parts(group, [self._parts(group, sequence) for sequence in group.sequences])
            return
        for i, sequence in enumerate(live):
            text = self._states[sequence].flush()
            piece = _OutputPart(text, finish=finish, cumulative_logprob=self._get_cumulative_logprob(sequence))
            piece.versions = sequence.count_versions(self.weight_version)
            piece.routed_experts = self._read_experts(group, sequence)
            self._show(group, sequence.index, piece, is_last=i + 1 == len(live))

    def fail(self, group: SequenceGroup, error: Exception) -> None:
        """Send an error as the last event of a request."""
        self._show(group, 0, _OutputPart(), is_last=True, error=error)

    def _new_state(self, group: SequenceGroup) -> OutputState:
        request = group.request
        return OutputState(self._texts, request.prompt_token_ids, request.sampling, self._eos_token_ids)

    def _get_parts(self, group: SequenceGroup, beam: Beam) -> list[_OutputPart]:
        """Return the parts of a finished beam, built token by token."""
        state, num_top, held = self._new_state(group), group.request.sampling.logprobs, WithheldOutput()
        for token_id in beam.token_ids:
            text, held.finish = state.push(token_id)
            held.texts.append(text)
        if num_top is not None:
            held.logprobs += [PositionLogprobs(one.chosen, one.top[:num_top]) for one in beam.logprobs]
        first = group.sequences[0]  # beams grow together
        end = first.num_given_tokens + len(beam.token_ids)
        versions = first.count_versions(self.weight_version, end)
        # The last step's tokens are not in the sequences.
        search = first.count_versions(self.weight_version, max(end, len(first.token_ids) + 1))
        return held.parts(beam.token_ids, beam.cumulative_logprob, _with_rankers(versions, search))

    def _parts(self, group: SequenceGroup, sequence: Sequence) -> list[_OutputPart]:
        """Return the parts of a withheld sequence; none if it was streamed, or has ended elsewhere."""
        state, sampling = self._states.get(sequence), group.request.sampling
        if state is None or state.held is None:
            return []
        token_ids = sequence.token_ids[sequence.num_given_tokens :]
        versions = sequence.count_versions(self.weight_version)
        if sampling.num_samples > sampling.n:
            runs = [run for each in group.sequences for run in each.count_versions(self.weight_version)]
            versions = _with_rankers(versions, runs)
        return state.held.parts(token_ids, self._get_cumulative_logprob(sequence), versions)

    def _read_experts(self, group: SequenceGroup, sequence: Sequence) -> NDArray[Any] | None:
        """Return the experts of a sequence that ends; None without any. Waits for all dispatched steps."""
        if self._routed_experts is None:
            return None
        start = group.request.sampling.routed_experts_prompt_start
        if not sequence.kv.tables[0].num_blocks:  # preempted, perhaps while the step ran that ends it
            kept = self._states[sequence].kept_experts
            return None if kept is None else kept[start : len(sequence.token_ids) - 1]
        return self._read_blocks(sequence, start)

    def keep_experts(self, group: SequenceGroup) -> None:
        """Read the experts of a group that loses its blocks: a step in flight may end its sequences."""
        for sequence in group.live:
            if self._routed_experts is not None and sequence.kv.tables[0].num_blocks:
                self._states[sequence].kept_experts = self._read_blocks(sequence, 0, sequence.num_computed_tokens)

    def _read_blocks(self, sequence: Sequence, start: int, end: int | None = None) -> NDArray[Any]:
        """Return the experts of computed tokens from `start` on, by default without the last known token."""
        assert self._routed_experts is not None
        table, block_size = sequence.kv.tables[0], self._routed_experts.block_size
        num_tokens = min(len(sequence.token_ids) - 1 if end is None else end, sequence.num_computed_tokens)
        start = min(start, num_tokens)
        first, end = start // block_size, -(-num_tokens // block_size)
        block_ids = [table.block_id(index) for index in range(first, end)]
        return self._routed_experts.read(block_ids, num_tokens - first * block_size)[start - first * block_size :]

    def _get_cumulative_logprob(self, sequence: Sequence) -> float | None:
        return sequence.cumulative_logprob if self._states[sequence].needs_logprobs else None

    def _show_parts(self, group: SequenceGroup, sequences: list[list[_OutputPart]]) -> None:
        """Send the parts of withheld sequences in index order, ending with the request's last event."""
        parts = [(index, part) for index, pieces in enumerate(sequences) for part in pieces]
        for number, (index, part) in enumerate(parts, start=1):
            self._show(group, index, part, is_last=number == len(parts))

    def _send_prompt_results(self, group: SequenceGroup) -> None:
        """Send the prompt log-probabilities or embedding, in events of bounded size."""
        results, request_id = self.aux_outputs.ready.pop(group), group.request.request_id
        for begin in range(0, max(1, len(results.logprobs)), _MAX_TOKENS_PER_EVENT):
            part = tuple(results.logprobs[begin : begin + _MAX_TOKENS_PER_EVENT])
            embedding = results.embedding if not begin else ()
            group.sink(OutputEvent(request_id, usage=_usage(group), prompt_logprobs=part, embedding=embedding))

    def _build_usage(self, group: SequenceGroup) -> Usage:
        """Return the usage of a request; a search counts the tokens of the beams that it returns."""
        usage, search = _usage(group), self._searches.get(group)
        if search is None:
            return usage
        beams = search.best(group.request.sampling.n) if search.is_done else []
        return dataclasses.replace(usage, completion_tokens=sum(len(beam.token_ids) for beam in beams))

    def _show(
        self, group: SequenceGroup, index: int, piece: _OutputPart, *, is_last: bool, error: Exception | None = None
    ) -> None:
        if group in self.aux_outputs.ready and error is None:
            self._send_prompt_results(group)
        experts = piece.routed_experts
        while experts is not None and experts.nbytes > _MAX_EXPERT_BYTES:
            size = max(1, _MAX_EXPERT_BYTES // experts[0].nbytes)
            group.sink(OutputEvent(group.request.request_id, index, usage=_usage(group), routed_experts=experts[:size]))
            experts = experts[size:]
        event = OutputEvent(
            request_id=group.request.request_id,
            index=index,
            text=piece.text,
            token_ids=piece.token_ids,
            logprobs=piece.logprobs,
            finish=piece.finish,
            cumulative_logprob=piece.cumulative_logprob,
            usage=self._build_usage(group),
            is_last=is_last,
            times=group.times if is_last else None,
            weight_versions=piece.versions,
            routed_experts=experts,
            error=error,
        )
        if is_last:
            failed = DEADLINE if isinstance(error, DeadlineExceeded) else ERROR
            group.ended(failed if piece.finish is None else piece.finish.reason.value)
            self._last_events[group] = event
        else:
            group.sink(event)


def _usage(group: SequenceGroup) -> Usage:
    num_tokens, embeds = len(group.request.prompt_token_ids), group.request.embeds
    num_image_tokens = 0 if embeds is None else embeds.num_image_tokens
    return Usage(num_tokens, group.num_sampled_tokens, group.num_cached_tokens or 0, num_image_tokens)


def _with_rankers(
    versions: tuple[WeightVersionRun, ...], runs: Iterable[WeightVersionRun]
) -> tuple[WeightVersionRun, ...]:
    """Add, with 0 tokens, the versions that sampled only sequences that this one was ranked with.

    Args:
        runs: versions of all sequences that the request selects from.
    """
    names = dict.fromkeys(run.version for run in versions)
    rankers = dict.fromkeys(run.version for run in runs if run.version not in names)
    return versions + tuple(WeightVersionRun(name, 0) for name in rankers)
