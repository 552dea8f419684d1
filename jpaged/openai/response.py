"""Answers to completions and chats in OpenAI's format, whole and streamed, from the outputs of their requests. No I/O.

Fields that OpenAI lacks have vLLM's names: `stop_reason`, `reasoning`, `token_ids`, and the prompt's
log-probabilities (https://docs.vllm.ai/en/v0.9.0/serving/openai_compatible_server.html).

Events of streamed requests become chunks, sent as server-sent events:

    completions   data: {..., "choices": [{"index", "text", "logprobs", "finish_reason"}]}
    chats         data: {..., "choices": [{"index", "delta": {"role" | "content" | ...}, "finish_reason"}]}
    at the end    data: {..., "choices": [], "usage": {...}}    if requested
                  data: [DONE]

Most events of a stream only add text: their chunk is that text between two cached byte strings.
"""

from __future__ import annotations

import base64
import codecs
import io
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jpaged import json_text
from jpaged.chat import ToolCallPiece
from jpaged.errors import InvalidArgument
from jpaged.json_text import Items
from jpaged.openai.chat_tools import CallForm, CallStream
from jpaged.openai.request import Job, Streaming
from jpaged.types import (
    CompletionOutput,
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    SamplingParams,
    SequenceDelta,
    Usage,
    WeightVersionRun,
)


def reasoning_fields(text: str) -> dict[str, str]:
    """Return the fields of reasoning in a message: DeepSeek's and SGLang's name, and vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def build_message(
    output: CompletionOutput, role: str = "assistant", echoed: str = "", form: CallForm | None = None
) -> dict[str, Any]:
    """Return an answer as a message: without content if it only calls tools, and with `reasoning` null if it has none.

    Args:
        echoed: text before the answer's.
        form: form of the calls; None for `tool_calls` of functions.
    """
    text = echoed + output.text
    message: dict[str, Any] = {"role": role, "content": text, "reasoning": None}
    if output.reasoning_content:
        message |= reasoning_fields(output.reasoning_content)
    if output.tool_calls:
        message["content"] = text or None
        if form is None:
            message["tool_calls"] = [call.as_json() for call in output.tool_calls]
        else:
            form.add_calls(message, output.tool_calls)
    return message


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token as log-probabilities show it.

    Attributes:
        data: the bytes that it adds to a text; None if unknown.
        alone: text of the single token, from which some tokenizers strip a space.
        is_special: texts without special tokens leave it out.
        name: shown instead of the text; "" shows the text.
    """

    data: bytes | None
    alone: str
    is_special: bool = False
    name: str = ""

    @property
    def text(self) -> str:
        """The text; invalid bytes are U+FFFD."""
        if self.name:
            return self.name
        return self.alone if self.data is None else self.data.decode(errors="replace")


TokenText = Callable[[int], ShownToken]


def _named_by(job: Job, token_text: TokenText) -> TokenText:
    """Return the texts of a job's tokens: `token_id:N` if the caller asks for ids."""
    if not job.names_token_ids:
        return token_text
    return lambda token_id: replace(token_text(token_id), name=f"token_id:{token_id}")


MAX_CHARACTER_TOKENS = 4


class TextOffsets:
    """Character offsets of the tokens in one text; tokens are added in order.

    Args:
        before: bytes of the prompt's last tokens, which may begin a character that the text completes.
        is_whole: the text begins with the first token.
        skips_special: special tokens are not in the text.
        num_whole: number of first tokens whose special tokens are in the text in any case.
    """

    def __init__(
        self, before: bytes = b"", *, is_whole: bool = False, skips_special: bool = True, num_whole: int = 0
    ) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(before)
        self._is_whole = is_whole
        self._skips_special = skips_special
        self._num_whole = num_whole
        self._num_chars = 0

    @classmethod
    def of_answer(cls, job: Job, number: int, prompt_token_ids: Sequence[int], token_text: TokenText) -> TextOffsets:
        """Return the offsets of an answer to a prompt; the text includes the prompt if the job has an echo."""
        skips_special = job.sampling.skip_special_tokens
        if job.has_echo:
            num_whole = 0 if job.echoes_text(number) else len(prompt_token_ids)
            return cls(is_whole=True, skips_special=skips_special, num_whole=num_whole)
        last = [token_text(token_id) for token_id in prompt_token_ids[-MAX_CHARACTER_TOKENS:]]
        return cls(b"".join(token.data or b"" for token in last), skips_special=skips_special)

    def add(self, token: ShownToken) -> int:
        """Return the character offset of a token; a token inside a character has the offset of that character."""
        begin = self._num_chars
        self._num_whole -= 1
        if not token.is_special or not self._skips_special or self._num_whole >= 0:
            data = token.alone.encode() if token.data is None else token.data
            if self._is_whole and data.startswith(b" ") and not token.alone.startswith(" "):
                data = data[1:]
            self._is_whole = False
            self._num_chars += len(self._decoder.decode(data))
        return begin


@dataclass(frozen=True, slots=True)
class ResponseMetadata:
    """Common fields of an answer and the answer's chunks.

    Attributes:
        request_id: base of the id.
        model: the name in the request.
        created: seconds since 1970.
        has_versions: choices have the versions of the weights that sampled them.
    """

    request_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    has_versions: bool = False

    def as_json(self, *, is_chat: bool, is_chunk: bool = False) -> dict[str, Any]:
        """Return the fields before the choices."""
        kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if is_chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


_ENTRY_BYTES = 40
"""Approximate bytes of a log-probability in an answer to completions."""
_LONG_ENTRY_BYTES = 80
"""The same in an answer to a chat, which includes the token's bytes, and for prompts, which include ranks."""


class AnswerSize:
    """Estimate of an answer's size, checked against a limit before the answer is computed.

    Args:
        num_prompts: number of prompts of the request.
        vocab_size: number of log-probabilities that `-1` stands for.
        has_echo: the prompt's log-probabilities are written as those of the text.
        counts_generated: False for a stream, which does not keep sent output.
        max_bytes: the limit.

    Raises:
        InvalidArgument: the generated part alone exceeds the limit.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        num_prompts: int = 1,
        vocab_size: int,
        is_chat: bool,
        has_echo: bool = False,
        counts_generated: bool = True,
        max_bytes: int,
    ) -> None:
        width = _width(sampling.logprobs, vocab_size) + len(sampling.logprob_token_ids or ())
        width += 3 if sampling.sampling_logprobs else 0
        self._max_bytes = max_bytes
        self._prompt_field = "logprobs" if has_echo else "prompt_logprobs"
        self._bytes_of_prompt_token = _width(sampling.prompt_logprobs, vocab_size) * (
            _ENTRY_BYTES if has_echo else _LONG_ENTRY_BYTES
        )
        bytes_of_token = sampling.n * width * (_LONG_ENTRY_BYTES if is_chat else _ENTRY_BYTES)
        self._num_prompt_tokens = 0
        generated = num_prompts * sampling.max_num_tokens * bytes_of_token if counts_generated else 0
        self._num_bytes = generated
        self.max_filled = max_bytes // bytes_of_token if counts_generated and bytes_of_token else None
        if generated > max_bytes:
            what = f"{width} at each of {num_prompts * sampling.n} x {sampling.max_num_tokens} tokens (max_tokens)"
            raise self._error("logprobs", what)

    def add_prompt(self, num_tokens: int) -> None:
        """Count a prompt's tokens; raise InvalidArgument if the answer exceeds the limit."""
        self._num_prompt_tokens += num_tokens
        self._num_bytes += num_tokens * self._bytes_of_prompt_token
        if self._num_bytes > self._max_bytes and self._bytes_of_prompt_token:
            raise self._error(self._prompt_field, f"those of {self._num_prompt_tokens} prompt tokens")

    def _error(self, field: str, what: str) -> InvalidArgument:
        size = f"an answer of about {self._num_bytes / 2**20:.0f} MiB"
        return InvalidArgument(
            field, f"{what} make {size}, over the limit of {self._max_bytes / 2**20:g} MiB (max_response_size)"
        )


def _width(asked: int | None, vocab_size: int) -> int:
    """Return the number of log-probabilities per position: the token's, and the top ones."""
    return 0 if asked is None else 1 + (vocab_size if asked < 0 else asked)


_MAX_LISTED = 16
"""Number of choices up to which a response is built at once, which is faster than while it is written."""


def build_answer(
    heading: ResponseMetadata,
    job: Job,
    outputs: Sequence[RequestOutput],
    token_text: TokenText,
    prompt_texts: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the response body of a job; `json_text.pieces` produces large parts lazily.

    Args:
        outputs: output of each prompt.
        token_text: returns the text of every token in the log-probabilities.
        prompt_texts: text of each prompt, if the job has an echo.
    """
    token_text = _named_by(job, token_text)

    def choices() -> Iterator[dict[str, Any]]:
        for number, output in enumerate(outputs):
            shown = _without_dropped_token(output) if job.is_only_told else output
            prompt_text = prompt_texts[number] if job.has_echo else ""
            for one in shown.outputs:
                index = number * job.sampling.n + one.index
                choice = _choice(job, number, shown, one, token_text, prompt_text) | {"index": index}
                if one.routed_experts is not None:
                    choice["routed_experts"] = _npy_base64(one.routed_experts)
                yield choice | _versions(one.weight_versions) if heading.has_versions else choice

    usages = [replace(one.usage, completion_tokens=0) if job.is_only_told else one.usage for one in outputs]
    is_short = sum(len(output.outputs) for output in outputs) <= _MAX_LISTED
    answered = [*choices()] if is_short else Items(choices)
    body = {**heading.as_json(is_chat=job.is_chat), "choices": answered, "usage": build_usage(usages)}
    if job.is_chat:
        body |= _of_prompt(job, outputs[0], token_text)
    return body


def _npy_base64(array: NDArray[Any]) -> str:
    """Return an array as vLLM's responses have it: the bytes of an .npy file, in base64."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return base64.b64encode(buffer.getbuffer()).decode("ascii")


def _versions(runs: Sequence[WeightVersionRun]) -> dict[str, Any]:
    """Return the choice's field for the versions of the weights."""
    return {"weight_versions": [{"version": run.version, "num_tokens": run.num_tokens} for run in runs]}


def build_usage(usages: Iterable[Usage]) -> dict[str, Any]:
    """Return the total usage of several requests."""
    prompt, completion, cached, images = 0, 0, 0, 0
    for usage in usages:
        prompt += usage.prompt_tokens
        completion += usage.completion_tokens
        cached += usage.cached_tokens
        images += usage.image_tokens
    details: dict[str, Any] = {"cached_tokens": cached}
    if images:
        details["multimodal_tokens"] = {"image": images}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }


def _without_dropped_token(output: RequestOutput) -> RequestOutput:
    """Return the output without its dropped token."""
    outputs = tuple(
        replace(
            one,
            text="",
            token_ids=(),
            logprobs=None if one.logprobs is None else (),
            finish_reason=FinishReason.LENGTH.value,
            matched_stop=None,
        )
        for one in output.outputs
    )
    return replace(output, outputs=outputs)


def _choice(
    job: Job, number: int, output: RequestOutput, one: CompletionOutput, token_text: TokenText, prompt_text: str
) -> dict[str, Any]:
    logprobs: dict[str, Any] | None = None
    if one.logprobs is not None and job.is_chat:
        logprobs = chat_logprobs(one.logprobs, token_text)
    elif one.logprobs is not None:
        told = echoed(output.prompt_token_ids, output.prompt_logprobs or ()) if job.has_echo else ()
        offsets = TextOffsets.of_answer(job, number, output.prompt_token_ids, token_text)
        logprobs = completion_logprobs((*told, *one.logprobs), token_text, offsets)
    content: dict[str, Any] = {"text": prompt_text + one.text}
    reason = one.finish_reason if job.call_form is None else job.call_form.get_finish_reason(one.finish_reason)
    if job.is_chat:
        content = {"message": build_message(one, job.role, job.echoed, job.call_form)}
    choice = {
        "index": one.index,
        **content,
        "logprobs": logprobs,
        "finish_reason": reason,
        "stop_reason": one.matched_stop,
    }
    choice["token_ids"] = list(one.token_ids) if job.has_token_ids else None
    return choice if job.is_chat else choice | _of_prompt(job, output, token_text)


def _of_prompt(job: Job, output: RequestOutput, token_text: TokenText) -> dict[str, Any]:
    """Return the fields about the prompt, for a chat's answer or each choice of a completion; null if not requested."""
    absent = {"prompt_logprobs": None, "prompt_token_ids": None}
    return absent | prompt_fields(job, output.prompt_token_ids, output.prompt_logprobs, token_text)


def prompt_fields(
    job: Job,
    prompt_token_ids: Sequence[int],
    told: Sequence[PositionLogprobs | None] | None,
    token_text: TokenText,
) -> dict[str, Any]:
    """Return the fields about a prompt; with an echo its log-probabilities are part of the text's."""
    fields: dict[str, Any] = {}
    if told is not None and job.shows_prompt_logprobs:
        fields["prompt_logprobs"] = prompt_logprobs(told, token_text)
    if job.has_token_ids:
        fields["prompt_token_ids"] = list(prompt_token_ids)
    return fields


def prompt_logprobs(told: Sequence[PositionLogprobs | None], token_text: TokenText) -> Items:
    """Return the log-probabilities of a prompt's tokens; None for the first."""

    def entry(position: PositionLogprobs | None) -> dict[str, Any] | None:
        if position is None:
            return None
        return {
            str(one.token_id): {
                "logprob": one.logprob,
                "rank": one.rank,
                "decoded_token": token_text(one.token_id).text,
            }
            for one in (position.chosen, *position.top)
        }

    return Items(lambda: map(entry, told))


Shown = int | PositionLogprobs
"""One token of a text: with log-probabilities, or only the id without."""


def echoed(prompt_token_ids: Sequence[int], told: Sequence[PositionLogprobs | None]) -> tuple[Shown, ...]:
    """Return the tokens of a prompt as the first tokens of a text."""
    rest = [position for position in told if position is not None]
    return (prompt_token_ids[0], *rest) if prompt_token_ids else ()


def completion_logprobs(positions: Sequence[Shown], token_text: TokenText, offsets: TextOffsets) -> dict[str, Any]:
    """Return log-probabilities in the format of completions, with the bytes of each token; advances `offsets`."""
    chosen = [position if isinstance(position, int) else position.chosen.token_id for position in positions]
    tokens = [token_text(token_id) for token_id in chosen]

    # Two tokens can have the same text (a byte of a character, for example); the more likely one is kept. The chosen
    # token is among them even if it is not one of the most likely, so they are never empty.
    def top(position: Shown) -> dict[str, float] | None:
        if isinstance(position, int):
            return None
        every = (position.chosen, *position.top, *position.asked)
        return {token_text(t.token_id).text: t.logprob for t in sorted(every, key=lambda t: t.logprob)}

    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [None if isinstance(position, int) else position.chosen.logprob for position in positions],
        "top_logprobs": Items(lambda: map(top, positions)),
        **_sampling_lists(positions),
        "text_offset": [offsets.add(token) for token in tokens],
        "bytes": Items(lambda: (None if token.data is None else list(token.data) for token in tokens)),
    }


def _sampling_lists(positions: Sequence[Shown]) -> dict[str, list[float | None]]:
    """Return the lists of requests with `sampling_logprobs`, without values for the tokens of an echo."""
    told = [None if isinstance(position, int) else position for position in positions]
    if not told or told[-1] is None or told[-1].entropy is None:
        return {}
    return {
        "sampling_logprobs": [None if one is None else one.sampling_logprob for one in told],
        "entropies": [None if one is None else one.entropy for one in told],
    }


def chat_logprobs(positions: Sequence[PositionLogprobs], token_text: TokenText) -> dict[str, Any]:
    """Return log-probabilities in the format of chats."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        token = token_text(token_id)
        return {"token": token.text, "logprob": logprob, "bytes": None if token.data is None else list(token.data)}

    def entries(position: PositionLogprobs) -> dict[str, Any]:
        chosen, shown = position.chosen, (*position.top, *position.asked)
        if position.asked and chosen.token_id not in {token.token_id for token in shown}:
            shown = (chosen, *shown)
        of_sample = {"sampling_logprob": position.sampling_logprob, "entropy": position.entropy}
        return {
            **entry(chosen.token_id, chosen.logprob),
            "top_logprobs": [entry(token.token_id, token.logprob) for token in shown],
            **({} if position.entropy is None else of_sample),
        }

    return {"content": Items(lambda: map(entries, positions))}


DONE = b"data: [DONE]\n\n"
_MARK = "\x00"
"""Placeholder for the text in a cached chunk."""


def sent_event(value: object) -> bytes:
    """Encode a JSON value as a server-sent event."""
    return b"".join((b"data: ", *json_text.pieces(value), b"\n\n"))


class ChunkBuilder:
    """Builds the chunks of one job. Must not be shared between threads.

    Args:
        token_text: returns the text of every token in the log-probabilities.
    """

    def __init__(self, heading: ResponseMetadata, job: Job, token_text: TokenText) -> None:
        self._job = job
        self._token_text = _named_by(job, token_text)
        self._how = job.streaming or Streaming()
        self._heading = heading.as_json(is_chat=job.is_chat, is_chunk=True)
        self._has_versions = heading.has_versions
        self._usages = [Usage() for _ in job.prompts]
        self._sent_positions: list[list[PositionLogprobs]] = [[] for _ in job.prompts]
        self._begun: set[int] = set()
        self._offsets: dict[int, TextOffsets] = {}
        self._plain: dict[int, tuple[bytes, bytes]] = {}
        self._calls: dict[int, CallStream] = {}
        self._has_logprobs = job.sampling.returns_logprobs
        self._is_plain = not (
            self._has_logprobs or job.has_token_ids or job.is_only_told or self._how.continuous_usage_stats
        )

    def of(
        self, number: int, event: SequenceDelta, prompt_token_ids: Sequence[int] = (), prompt_text: str = ""
    ) -> bytes:
        """Return the chunks of an event; empty if it adds nothing visible.

        Args:
            number: index of the event's prompt in the job.
            prompt_text: text of that prompt, if the job has an echo.
        """
        usage_before, self._usages[number] = self._usages[number], event.usage
        index = number * self._job.sampling.n + event.index
        is_text = event.text and event.finish is None and not (event.reasoning_content or event.tool_calls)
        if is_text and self._is_plain and index in self._begun:
            before, after = self._plain.get(index) or self._made_plain(index)
            return before + json_text.quoted(event.text) + after
        self._sent_positions[number] += event.prompt_logprobs
        if not (event.token_ids or event.text or event.finish or event.reasoning_content or event.tool_calls):
            return b""
        if self._has_logprobs and index not in self._begun and not self._job.is_chat:
            self._offsets[index] = TextOffsets.of_answer(self._job, number, prompt_token_ids, self._token_text)
        begin = b""
        if index not in self._begun:
            self._usages[number] = replace(event.usage, completion_tokens=usage_before.completion_tokens)
            begin = self._begin(number, index, prompt_token_ids, prompt_text)
            self._usages[number] = event.usage
            self._begun.add(index)
            if self._begun.issuperset(range(first := number * self._job.sampling.n, first + self._job.sampling.n)):
                self._sent_positions[number] = []  # no other choice of this prompt repeats them
        return begin + self._added(number, index, event)

    def end(self) -> bytes:
        """Return the chunks after the last event."""
        if not self._how.include_usage:
            return DONE
        return sent_event({**self._heading, "choices": [], "usage": self._usage(self._usages)}) + DONE

    def _usage(self, usages: Sequence[Usage]) -> dict[str, Any]:
        usage = build_usage(usages)
        if self._job.is_only_told:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _begin(self, number: int, index: int, prompt_token_ids: Sequence[int], prompt_text: str) -> bytes:
        """Return the chunk before a choice's first token: the role of a chat, or the echo of a prompt."""
        job = self._job
        told: list[PositionLogprobs | None] | None = None
        if job.sampling.prompt_logprobs is not None:
            told = [None, *self._sent_positions[number]]
        fields = prompt_fields(job, prompt_token_ids, told, self._token_text)
        if job.is_chat:
            choice = {"index": index, "delta": {"role": job.role, "content": job.echoed}, "logprobs": None}
            return self._chunk(choice | {"finish_reason": None}, number, fields)
        if not (job.has_echo or fields):
            return b""
        logprobs = None
        if job.has_echo and told is not None:
            logprobs = self._logprobs(index, echoed(prompt_token_ids, told))
        choice = {"index": index, "text": prompt_text, "logprobs": logprobs, "finish_reason": None}
        if job.has_token_ids:
            fields["token_ids"] = []
        return self._chunk(choice | {"stop_reason": None} | fields, number)

    def _added(self, number: int, index: int, event: SequenceDelta) -> bytes:
        job, finish = self._job, event.finish
        reason = None if finish is None else finish.reason.value
        stopped_by = None if finish is None else finish.matched_stop
        text, token_ids, positions = event.text, event.token_ids, event.logprobs
        if job.is_only_told:
            if finish is None:
                return b""
            reason, stopped_by, text, token_ids, positions = FinishReason.LENGTH.value, None, "", (), ()
        is_told = job.has_token_ids or positions or self._how.continuous_usage_stats
        if not (text or event.reasoning_content or event.tool_calls or finish or is_told):
            return b""
        choice: dict[str, Any] = {"index": index}
        if job.is_chat:
            choice["delta"] = self._delta(index, event)
            if not (choice["delta"] or finish or is_told):
                return b""  # no input of a custom tool yet
            choice["logprobs"] = chat_logprobs(positions, self._token_text) if positions else None
        else:
            choice["text"] = text
            choice["logprobs"] = self._logprobs(index, positions) if positions else None
        choice["finish_reason"] = reason if job.call_form is None else job.call_form.get_finish_reason(reason)
        if finish is not None or not job.is_chat:
            choice["stop_reason"] = stopped_by
        if finish is not None and self._has_versions:
            choice |= _versions(event.weight_versions)
        if job.has_token_ids:
            choice["token_ids"] = list(token_ids)
        return self._chunk(choice, number)

    def _delta(self, index: int, event: SequenceDelta) -> dict[str, Any]:
        delta = _delta(event)
        if self._job.call_form is None:
            return delta
        calls = self._calls.setdefault(index, CallStream(self._job.call_form))
        return delta | calls.add(delta.pop("tool_calls", ()), is_end=event.finish is not None)

    def _logprobs(self, index: int, positions: Sequence[Shown]) -> dict[str, Any]:
        return completion_logprobs(positions, self._token_text, self._offsets[index])

    def _chunk(self, choice: dict[str, Any], number: int, fields: dict[str, Any] | None = None) -> bytes:
        return sent_event({**self._heading, "choices": [choice], **(fields or {}), **self._usage_so_far(number)})

    def _usage_so_far(self, number: int) -> dict[str, Any]:
        if self._how.continuous_usage_stats:
            return {"usage": self._usage([self._usages[number]])}
        return {"usage": None} if self._how.include_usage else {}

    def _made_plain(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text in a chunk that only adds text."""
        choice: dict[str, Any] = {"index": index}
        if self._job.is_chat:
            choice |= {"delta": {"content": _MARK}, "logprobs": None, "finish_reason": None}
        else:
            choice |= {"text": _MARK, "logprobs": None, "finish_reason": None, "stop_reason": None}
        before, _, after = self._chunk(choice, 0).partition(json_text.quoted(_MARK))
        self._plain[index] = before, after
        return before, after


def _delta(event: SequenceDelta) -> dict[str, Any]:
    """Return the delta of an event: reasoning, content and calls, in that order."""
    delta: dict[str, Any] = {}
    if event.reasoning_content:
        delta |= reasoning_fields(event.reasoning_content)
    if event.text:
        delta["content"] = event.text
    if event.tool_calls:
        delta["tool_calls"] = _calls(event.tool_calls)
    return delta


def _calls(pieces: Sequence[ToolCallPiece]) -> list[dict[str, Any]]:
    """Merge pieces so that each call has one: clients take several pieces in a chunk for several calls."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
        if piece.name is not None:
            call |= {"id": piece.id, "type": "function"}
            call["function"]["name"] = piece.name
        call["function"]["arguments"] += piece.arguments
    return [calls[index] for index in sorted(calls)]
