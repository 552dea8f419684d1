"""The OpenAI batch file format: one JSON object a line, in and out. No I/O.

    in    {"custom_id", "method": "POST", "url": one of `URLS`, "body": {...}}
    out   {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": null}
          {"id", "custom_id", "response": null, "error": {"code", "message"}}

A line ends with a line feed, and with nothing else: texts may hold any other character. A line of input that is no
request becomes a failed line of output, with a custom_id of null where it has none.

A field of a body that cannot be honoured is an error of its line, never ignored. A few fields say what happens anyway
(`stream` of false, `echo` of false): those pass with that value and with no other. What OpenAI does not have but
`SamplingParams` does (`top_k`, `beam_width`, `cache_salt`, ...) is a field of the body too, as `adapter` is, the name
of one that the server has loaded. Log-probabilities of the prompt are `prompt_logprobs` of each choice, and of
the whole answer to a chat: an entry a token as vLLM has it
(https://docs.vllm.ai/en/v0.9.0/serving/openai_compatible_server.html). What chats have beside is read in
`chats.py`, bodies of /v1/embeddings and /v1/score in `scoring.py`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jpaged import json_text
from jpaged.chat import ChatOptions
from jpaged.errors import InvalidArgument, JpagedError
from jpaged.openai.chats import CHAT_FIELDS, chat_options_in, message_of, messages_in
from jpaged.structured import response_format_of
from jpaged.types import CompletionOutput, PositionLogprobs, RequestOutput, SamplingParams

COMPLETIONS_URL = "/v1/completions"
CHAT_URL = "/v1/chat/completions"
EMBEDDINGS_URL = "/v1/embeddings"
SCORE_URL = "/v1/score"
URLS = (COMPLETIONS_URL, CHAT_URL, EMBEDDINGS_URL, SCORE_URL)
_MAX_DEPTH = 64
_LINE_FIELDS = {"custom_id", "method", "url", "body"}
# Fields that change nothing at this value; any other value asks for something that does not exist here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
}
_NEUTRAL_COMPLETIONS: dict[str, tuple[Any, ...]] = {**_NEUTRAL, "echo": (False,), "suffix": ("",)}
_NEUTRAL_CHAT = _NEUTRAL
_SAMPLING = {f.name for f in fields(SamplingParams)} - {"logprobs"}
_TEXTS = {"stop", "bad_words"}
"""Lists of texts, of which one may stand by itself."""
_LISTS = _TEXTS | {"stop_token_ids", "allowed_token_ids", "logprob_token_ids"}
_FLAGS = {f.name for f in fields(SamplingParams) if isinstance(f.default, bool)} - {"early_stopping"}
_MAX_ID_DIGITS = 10
"""Digits of 2**32 - 1, above which no message has a token id."""
TokenText = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Line:
    """One request of an input file, as it stands there. `number` counts from 1."""

    number: int
    custom_id: str
    url: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """What a line asks for.

    Attributes:
        fills_length: max_tokens is to be what the model's length leaves after the prompt: a chat without a limit.
    """

    sampling: SamplingParams
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    chat_options: ChatOptions | None = None
    model: str | None = None
    adapter: str | None = None
    fills_length: bool = False


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line of an input file that is no request, and why; with its custom_id as far as it has one."""

    number: int
    custom_id: str | None
    error: InvalidArgument


def parse_file(data: bytes) -> list[Line | BadLine]:
    """All lines of an input file, as `parse_lines`.

    Raises:
        InvalidArgument: it is not UTF-8, or as in `parse_lines`.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise InvalidArgument(f"line {number}", f"is not UTF-8: byte 0x{data[error.start]:02x}") from error
    return parse_lines(text.split("\n"))


def parse_lines(texts: Sequence[str]) -> list[Line | BadLine]:
    """All lines of an input file; empty ones are passed over.

    Raises:
        InvalidArgument: no line has a custom_id, or two share one: nothing has been sent then.
    """
    lines: list[Line | BadLine] = []
    first: dict[str, int] = {}
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        line = parse_line(number, text)
        lines.append(line)
        if line.custom_id is None:
            continue
        if line.custom_id in first:
            raise InvalidArgument(
                f"line {number}: custom_id", f"{line.custom_id!r} is that of line {first[line.custom_id]} too"
            )
        first[line.custom_id] = number
    if lines and isinstance(lines[0], BadLine) and not first:
        raise lines[0].error
    return lines


def parse_line(number: int, text: str) -> Line | BadLine:
    """One line of an input file, which is its `number`-th."""
    try:
        value = loaded(f"line {number}", text)
    except InvalidArgument as error:
        return BadLine(number, None, error)
    return line_of(number, value)


def line_of(number: int, value: Mapping[str, Any]) -> Line | BadLine:
    """A line whose fields have been read."""
    given = value.get("custom_id")
    try:
        _check_line(f"line {number}", value)
    except InvalidArgument as error:
        return BadLine(number, given if isinstance(given, str) and given else None, error)
    return Line(number, value["custom_id"], value["url"], value["body"])


def loaded(where: str, text: str) -> dict[str, Any]:
    """The JSON object that a text holds.

    Raises:
        InvalidArgument: it holds none; says `where`.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise InvalidArgument(where, f"is nested deeper than the limit of {_MAX_DEPTH}") from error
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        raise InvalidArgument(where, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(where, "is not a JSON object")
    return value


def _check_line(where: str, value: Mapping[str, Any]) -> None:
    for name in value.keys() - _LINE_FIELDS:
        raise InvalidArgument(f"{where}: {name}", f"unknown field; the fields are {', '.join(sorted(_LINE_FIELDS))}")
    for name in sorted(_LINE_FIELDS - value.keys()):
        raise InvalidArgument(f"{where}: {name}", "is missing")
    _check_values(where, value)
    if not isinstance(value["custom_id"], str) or not value["custom_id"]:
        raise InvalidArgument(f"{where}: custom_id", f"{value['custom_id']!r} is not a string with characters")
    if value["method"] != "POST":
        raise InvalidArgument(f"{where}: method", f"{value['method']!r} is not POST")
    if value["url"] not in URLS:
        raise InvalidArgument(f"{where}: url", f"{value['url']!r} is none of {', '.join(URLS)}")
    if not isinstance(value["body"], dict):
        raise InvalidArgument(f"{where}: body", "is not a JSON object")


def _check_values(where: str, value: Mapping[str, Any]) -> None:
    """Refuses what JSON can write and a message cannot carry: deep nesting, huge numbers, halves of characters."""
    waiting: list[tuple[str, Any, int]] = [(f"{where}: {name}", item, 1) for name, item in value.items()]
    while waiting:
        path, item, depth = waiting.pop()
        if isinstance(item, dict | list):
            if depth == _MAX_DEPTH:
                raise InvalidArgument(where, f"is nested deeper than the limit of {_MAX_DEPTH}")
            inside = item.items() if isinstance(item, dict) else ((path, one) for one in item)
            for name, one in inside:
                if isinstance(item, dict):
                    _check_text(path, name)
                waiting.append((f"{path}.{name}" if isinstance(item, dict) else path, one, depth + 1))
        elif isinstance(item, str):
            _check_text(path, item)
        elif isinstance(item, int | float) and not abs(item) < 2**64:
            raise InvalidArgument(path, f"{str(item)[:40]} is not a finite number of 64 bits at most")


def _check_text(path: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(path, f"has {text[error.start]!a}, half of a character, at {error.start}") from error


def body_of(line: Line) -> dict[str, Any]:
    """The fields of a body; those that are null count as left out."""
    return {name: value for name, value in line.body.items() if value is not None}


def job_of(line: Line) -> Job:
    """What a line of completions or of a chat asks for.

    Raises:
        InvalidArgument: a field of the body is unknown, wrong, or cannot be honoured.
    """
    body = body_of(line)
    return _chat_job(body) if line.url == CHAT_URL else _completion_job(body)


def _completion_job(body: dict[str, Any]) -> Job:
    _check_names(body, {"model", "adapter", "prompt", "logprobs"}, _NEUTRAL_COMPLETIONS)
    sampling = _sampling(body, _int_or_none(body, "logprobs"))
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return Job(sampling, prompt=prompt, model=name_in(body, "model"), adapter=name_in(body, "adapter"))
    if isinstance(prompt, list) and prompt and all(type(token_id) is int for token_id in prompt):
        model, adapter = name_in(body, "model"), name_in(body, "adapter")
        return Job(sampling, prompt_token_ids=tuple(prompt), model=model, adapter=adapter)
    raise InvalidArgument("body.prompt", "must be one string or one list of token ids; write one line for each prompt")


def _chat_job(body: dict[str, Any]) -> Job:
    own = {"model", "adapter", "logprobs", "top_logprobs", "max_completion_tokens", "response_format", *CHAT_FIELDS}
    _check_names(body, own, _NEUTRAL_CHAT)
    if "max_completion_tokens" in body:
        if "max_tokens" in body:
            raise InvalidArgument("body.max_tokens", "and max_completion_tokens are one thing: give one of them")
        body["max_tokens"] = body["max_completion_tokens"]
    wants_logprobs = body.get("logprobs", False)
    if not isinstance(wants_logprobs, bool):
        raise InvalidArgument("body.logprobs", f"{wants_logprobs!r} is not true or false")
    num_top = _int_or_none(body, "top_logprobs")
    if num_top is not None and not wants_logprobs:
        raise InvalidArgument("body.top_logprobs", "needs logprobs to be true")
    return Job(
        _sampling(body, (num_top or 0) if wants_logprobs else None),
        messages=messages_in(body),
        chat_options=chat_options_in(body),
        model=name_in(body, "model"),
        adapter=name_in(body, "adapter"),
        fills_length="max_tokens" not in body,
    )


def _check_names(body: Mapping[str, Any], own: set[str], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    for name, value in body.items():
        if name in neutral:
            if value not in neutral[name] or isinstance(value, bool) != isinstance(neutral[name][0], bool):
                raise InvalidArgument(f"body.{name}", f"{value!r} is not supported: only {neutral[name][0]!r} is")
        elif name not in own and name not in _SAMPLING:
            raise InvalidArgument(f"body.{name}", "is not supported")


def _sampling(body: Mapping[str, Any], logprobs: int | None) -> SamplingParams:
    values = {name: value for name, value in body.items() if name in _SAMPLING}
    for name in _LISTS & values.keys():
        if not isinstance(values[name], list | (str if name in _TEXTS else list)):
            raise InvalidArgument(f"body.{name}", f"{values[name]!r} is not a list")
    for name in _FLAGS & values.keys():
        if not isinstance(values[name], bool):
            raise InvalidArgument(f"body.{name}", f"{values[name]!r} is not true or false")
    if "logit_bias" in values:
        values["logit_bias"] = _biases(values["logit_bias"])
    try:
        if "response_format" in body:
            if values.get("structured_outputs") is not None:
                raise InvalidArgument("body.response_format", "must be left out with structured_outputs")
            values["structured_outputs"] = response_format_of(body["response_format"], "body.response_format")
        return SamplingParams(**values, logprobs=logprobs)
    except InvalidArgument as error:
        raise InvalidArgument(error.field.replace("sampling.", "body."), error.problem) from error


def _biases(given: Any) -> dict[int, Any] | None:
    """Token ids -> what is added; JSON has them as texts."""
    if not isinstance(given, dict):
        raise InvalidArgument("body.logit_bias", f"{given!r} is not an object of token ids and numbers")
    for name in given:
        if not (name.isascii() and name.isdigit() and len(name) <= _MAX_ID_DIGITS):
            raise InvalidArgument("body.logit_bias", f"{name!r} is not a token id")
    biases = {int(name): bias for name, bias in given.items()}
    if len(biases) < len(given):
        raise InvalidArgument("body.logit_bias", "names a token twice")
    return biases or None


def name_in(body: Mapping[str, Any], field: str) -> str | None:
    """The name that a field has, None where it is left out; raises InvalidArgument for what is no string."""
    name = body.get(field)
    if name is not None and not isinstance(name, str):
        raise InvalidArgument(f"body.{field}", f"{name!r} is not a string")
    return name


def _int_or_none(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is not None and type(value) is not int:
        raise InvalidArgument(f"body.{name}", f"{value!r} is not an integer")
    return value


def success_line(line: Line, output: RequestOutput, *, model: str, token_text: TokenText) -> str:
    """The output line of a request that finished just now. `token_text` knows every token of its log-probabilities."""
    is_chat = line.url == CHAT_URL
    told = output.prompt_logprobs
    of_prompt = {} if told is None else {"prompt_logprobs": [_prompt_position(one, token_text) for one in told]}
    choices = [_choice(one, is_chat, token_text) for one in output.outputs]
    if not is_chat:
        choices = [{**choice, **of_prompt} for choice in choices]
    usage = output.usage
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{output.request_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
        **(of_prompt if is_chat else {}),
    }
    return response_line(line.custom_id, output.request_id, body)


def response_line(custom_id: str, request_id: str, body: Mapping[str, Any]) -> str:
    """The output line of a request that was answered with a body."""
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return _dumped({"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": None})


def failure_line(custom_id: str | None, error: JpagedError) -> str:
    """The output line of a request that failed for good."""
    return _dumped(
        {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": None,
            "error": {"code": error.grpc_status, "message": str(error)},
        }
    )


def _dumped(value: Mapping[str, Any]) -> str:
    line = json_text.dumps(value, ensure_ascii=False) + "\n"
    try:
        line.encode()
    except UnicodeEncodeError:  # half of a character, in a custom_id or in what is said about it
        return json_text.dumps(value) + "\n"
    return line


def _choice(output: CompletionOutput, is_chat: bool, token_text: TokenText) -> dict[str, Any]:
    shown = _chat_logprobs if is_chat else _completion_logprobs
    content: dict[str, Any] = {"message": message_of(output)} if is_chat else {"text": output.text}
    return {
        "index": output.index,
        **content,
        "logprobs": None if output.logprobs is None else shown(output.logprobs, token_text),
        "finish_reason": output.finish_reason,
        "stop_reason": output.matched_stop,
    }


def _prompt_position(position: PositionLogprobs | None, token_text: TokenText) -> dict[str, Any] | None:
    """What the model thought of one token of the prompt; of the first it thought nothing."""
    if position is None:
        return None
    return {
        str(one.token_id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": token_text(one.token_id)}
        for one in (position.chosen, *position.top)
    }


def _completion_logprobs(positions: Sequence[PositionLogprobs], token_text: TokenText) -> dict[str, Any]:
    tokens = [token_text(position.chosen.token_id) for position in positions]
    offsets = [0]
    for text in tokens[:-1]:
        offsets.append(offsets[-1] + len(text))
    # Two tokens can have one text (a byte of a character, say); the likelier one keeps the place.
    tops = [
        {token_text(t.token_id): t.logprob for t in reversed((*position.top, *position.asked))}
        for position in positions
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [position.chosen.logprob for position in positions],
        "top_logprobs": tops,
        "text_offset": offsets[: len(tokens)],
    }


def _chat_logprobs(positions: Sequence[PositionLogprobs], token_text: TokenText) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {
        "content": [
            {
                **entry(position.chosen.token_id, position.chosen.logprob),
                "top_logprobs": [entry(token.token_id, token.logprob) for token in (*position.top, *position.asked)],
            }
            for position in positions
        ]
    }
