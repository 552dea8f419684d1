"""Bodies of /v1/responses, whole and as events. OpenAI's format: https://platform.openai.com/docs/api-reference.

A conversation is sent whole with each call. Nothing is stored: `store` may have either value, and is false in answers.
Features that need a store, and OpenAI's built-in ones (tools, summaries, moderation), are rejected by name.

Items of an input become messages of a chat. Output items of earlier responses are accepted unchanged:

{"role", "content"}                         a message; content is a text or text parts
{"type": "reasoning", "content"}            reasoning before the assistant's next turn; a summary and
                                            encrypted_content are ignored
{"type": "function_call", "call_id", ...}   a call, in the preceding turn of the assistant
{"type": "function_call_output", ...}       the call's result

A streamed response is a list of numbered events in order:

response.created, response.in_progress
  response.output_item.added                    an item of reasoning, content or a call, as it comes
    response.content_part.added                 for reasoning and content
      response.reasoning_text.delta | response.output_text.delta | response.function_call_arguments.delta ...
      ... .done
    response.content_part.done
  response.output_item.done
response.completed | response.incomplete | response.failed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jpaged import json_text
from jpaged.chat import ToolCall, ToolCallPiece, without_surrogates
from jpaged.errors import InvalidArgument, JpagedError, get_reason
from jpaged.json_text import Items
from jpaged.openai.request import OF_CHATS, Job, chat_job, list_in, object_in, own_fields, without_nulls
from jpaged.openai.response import ResponseMetadata, TokenText, chat_logprobs
from jpaged.sampling_params import NO_DEFAULTS
from jpaged.types import CompletionOutput, FinishReason, OutputEvent, PositionLogprobs, RequestOutput, Usage

_MAX_SHOWN = 80
_ECHOED = frozenset({"id", "status", "phase"})
"""Fields of output items that identify them and give their status; ignored."""
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_PART_FIELDS = frozenset({"type", "text", "refusal", "annotations", "logprobs", "parsed"})


def build_messages(given: Any, instructions: str | None) -> list[dict[str, Any]]:
    """Convert an input to the messages of a chat.

    Raises:
        InvalidArgument: names the item, as in `input[2].call_id`.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidArgument("input", "must be a string, or a list of at least one item")
    thought = ""
    for i, item in enumerate(given):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise InvalidArgument(where, "must be an object")
        kind = item.get("type") or "message"
        if kind == "reasoning":
            thought += _reasoning_text(where, item)
        elif kind == "message":
            messages.append(_message(where, item))
        elif kind == "function_call":
            _add_call(messages, _call(where, item))
        elif kind == "function_call_output":
            messages.append(_call_output(where, item))
        elif kind == "item_reference":
            raise InvalidArgument(f"{where}.type", "is not supported, because nothing is stored: send the item itself")
        else:
            known = "message, reasoning, function_call, function_call_output"
            raise InvalidArgument(
                f"{where}.type", f"{str(kind)[:_MAX_SHOWN]!r} is not supported: must be one of {known}"
            )
        if thought and kind != "reasoning":
            _add_thought(messages, thought, before=1)
            thought = ""
    if thought:
        _add_thought(messages, thought, before=0)
    return messages


def _add_thought(messages: list[dict[str, Any]], thought: str, *, before: int) -> None:
    """Add reasoning to the assistant's turn after it; without one (truncated reasoning) it becomes a separate turn.

    Args:
        before: number of messages at the end that came after the reasoning.
    """
    if before and messages[-1]["role"] == "assistant" and "reasoning_content" not in messages[-1]:
        messages[-1]["reasoning_content"] = thought
        return
    turn = {"role": "assistant", "content": "", "reasoning_content": thought}
    messages.insert(len(messages) - before, turn)


def _message(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    _check_names(where, item, {"type", "role", "content", "name"})
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidArgument(f"{where}.role", f"{str(role)[:_MAX_SHOWN]!r} is not one of {', '.join(_ROLES)}")
    return {"role": _ROLES[role], "content": _text(f"{where}.content", item.get("content"), role)}


def _reasoning_text(where: str, item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item; a summary and `encrypted_content` of other servers are ignored."""
    _check_names(where, item, {"type", "summary", "content", "encrypted_content"})
    texts, content = [], item.get("content") or []
    if not isinstance(content, list):
        raise InvalidArgument(f"{where}.content", "must be a list of parts of type reasoning_text")
    for j, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "reasoning_text" or not isinstance(part.get("text"), str):
            raise InvalidArgument(f"{where}.content[{j}]", "must be a part of type reasoning_text")
        texts.append(part["text"])
    return "".join(texts)


def _call(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    _check_names(where, item, {"type", "call_id", "name", "arguments"})
    call_id, name, arguments = (_string(where, item, field) for field in ("call_id", "name", "arguments"))
    function = {"name": without_surrogates(name), "arguments": without_surrogates(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def _add_call(messages: list[dict[str, Any]], call: dict[str, Any]) -> None:
    """Add a call to the preceding turn of the assistant."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None, "tool_calls": []})
    messages[-1].setdefault("tool_calls", []).append(call)


def _call_output(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    _check_names(where, item, {"type", "call_id", "output"})
    call_id = _string(where, item, "call_id")
    return {"role": "tool", "tool_call_id": call_id, "content": _text(f"{where}.output", item.get("output"))}


def _text(where: str, given: Any, role: str = "") -> str:
    if isinstance(given, str):
        return given
    if given is None and role == "assistant":
        return ""
    if not isinstance(given, list):
        raise InvalidArgument(where, "must be a string, or a list of text parts")
    texts = []
    for j, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXT_PARTS[kind]) if isinstance(kind, str) and kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            shown = f"{str(kind)[:_MAX_SHOWN]!r}" if isinstance(part, dict) else "a part that is not an object"
            raise InvalidArgument(f"{where}[{j}]", f"{shown} is not a text part: only text is supported")
        for name in part.keys() - _PART_FIELDS:
            raise InvalidArgument(f"{where}[{j}].{name[:_MAX_SHOWN]}", "is not supported")
        texts.append(text)
    return "".join(texts)


def _string(where: str, item: Mapping[str, Any], field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise InvalidArgument(f"{where}.{field}", f"{str(value)[:_MAX_SHOWN]!r} is not a string")
    return value


def _check_names(where: str, item: Mapping[str, Any], known: set[str]) -> None:
    for name, value in item.items():
        if value is not None and name not in known and name not in _ECHOED:
            raise InvalidArgument(
                f"{where}.{name[:_MAX_SHOWN]}", f"is not supported: must be one of {', '.join(sorted(known))}"
            )


LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that requests the log-probabilities of the text."""
_ABSENT = (
    *("reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"),
    *("web_search_call.action.sources", "code_interpreter_call.outputs", "message.input_image.image_url"),
    "computer_call_output.output.image_url",
)
"""Values of `include` for items of other kinds, and for encrypted reasoning, which is null in every answer."""
MAX_METADATA = 16
MAX_METADATA_CHARS = 512
_OWN = frozenset(
    {
        *("input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "include", "top_logprobs"),
        *("metadata", "stream", "stream_options", "reasoning"),
    }
)
_OF_CHATS = OF_CHATS - {
    *("messages", "n", "best_of", "beam_width", "logprobs", "prompt_logprobs", "max_tokens", "max_completion_tokens"),
    *("response_format", "reasoning_effort", "echo", "return_token_ids", "return_tokens_as_token_ids"),
    "use_beam_search",
}
"""Fields that a chat has under the same name."""
OF_RESPONSES = _OWN | _OF_CHATS
_THEIRS = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "structured_outputs": "text.format",
    "messages": "input",
}
"""Chat field -> the field's name in a response."""
_TOOL_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A parsed body, as a chat and as the answer repeats it.

    Attributes:
        echoed: fields of the body that the answer repeats.
    """

    job: Job
    echoed: Mapping[str, Any]


def parse_responses_request(given: Mapping[str, Any], defaults: Mapping[str, Any] = NO_DEFAULTS) -> ResponsesRequest:
    """Parse a body of /v1/responses.

    Args:
        defaults: the model's sampling defaults, for fields that the body leaves out.

    Raises:
        InvalidArgument: a field is unknown, invalid, or cannot be honored.
    """
    body = own_fields("/v1/responses", given, OF_RESPONSES)
    instructions = body.get("instructions")
    if not isinstance(instructions, str | None):
        raise InvalidArgument("instructions", f"{str(instructions)[:_MAX_SHOWN]!r} is not a string")
    metadata, reasoning = _metadata(body.get("metadata", {})), object_in(body, "reasoning")
    text_format = _text_format(object_in(body, "text"))
    chat = {name: value for name, value in body.items() if name not in _OWN}
    chat |= {
        "messages": build_messages(body.get("input"), instructions),
        "max_completion_tokens": body.get("max_output_tokens"),
        "stream": body.get("stream"),
        "stream_options": _stream_options(body),
        "tools": [_tool(f"tools[{i}]", one) for i, one in enumerate(list_in(body, "tools"))] or None,
        "tool_choice": _tool_choice(body.get("tool_choice")),
        "response_format": _response_format(text_format),
        "reasoning": _reasoning(reasoning),
        **_logprobs(body),
    }
    try:
        job = chat_job(chat, defaults)
    except InvalidArgument as error:
        raise _in_their_words(error) from error
    names = {"max_tokens": "max_output_tokens", "structured_outputs": "text.format", "prompt": "input"}
    told = {name: theirs for name, theirs in names.items() if name in job.names}
    options, sampling = job.prompts[0].chat_options, job.sampling
    echoed = {
        "instructions": instructions,
        "max_output_tokens": body.get("max_output_tokens"),
        "parallel_tool_calls": options.parallel_tool_calls,
        "reasoning": {"effort": options.reasoning.effort, "summary": None},
        "temperature": sampling.temperature,
        "text": {"format": text_format},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": list_in(body, "tools"),
        "top_logprobs": body.get("top_logprobs", 0),
        "top_p": sampling.top_p,
        "user": job.user,
        "metadata": metadata,
    }
    return ResponsesRequest(replace(job, names={**job.names, **told}), echoed)


def _stream_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stream options for a chat: a response ends with its usage in any case."""
    options = object_in(body, "stream_options")
    for name in ("include_usage", "continuous_usage_stats"):
        if options.get(name) not in (None, False):
            raise InvalidArgument(f"stream_options.{name}", "is not supported: a response ends with its usage")
    return options


def _text_format(text: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in text.items():
        if name == "verbosity" and value not in ("low", "medium", "high"):
            raise InvalidArgument("text.verbosity", f"{str(value)[:_MAX_SHOWN]!r} is not one of low, medium, high")
        if name not in ("format", "verbosity"):
            raise InvalidArgument(f"text.{name[:_MAX_SHOWN]}", "is not supported: must be format or verbosity")
    given = text.get("format", {"type": "text"})
    if not isinstance(given, dict) or given.get("type") not in ("text", "json_object", "json_schema"):
        raise InvalidArgument("text.format", "must be an object whose type is text, json_object or json_schema")
    return given


def _response_format(text_format: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response format of a chat, which nests a schema in another object."""
    if text_format["type"] != "json_schema":
        return dict(text_format)
    return {"type": "json_schema", "json_schema": {k: v for k, v in text_format.items() if k != "type"}}


def _tool(where: str, given: Any) -> dict[str, Any]:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind != "function":
        problem = (
            f"{str(kind)[:_MAX_SHOWN]!r} is not supported: only tools of type 'function' are, which the client runs"
        )
        raise InvalidArgument(f"{where}.type", problem)
    for name, value in given.items():
        if name != "type" and name not in _TOOL_FIELDS and value is not None:
            raise InvalidArgument(
                f"{where}.{name[:_MAX_SHOWN]}", f"is not supported: must be one of {', '.join(_TOOL_FIELDS)}"
            )
    return {"type": "function", "function": {name: given[name] for name in _TOOL_FIELDS if name in given}}


def _tool_choice(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    if given.get("type") != "function" or given.keys() - {"type", "name"}:
        shown = str(given.get("type"))[:_MAX_SHOWN]
        raise InvalidArgument(
            "tool_choice", f"{shown!r} is not supported: must be 'none', 'auto', 'required' or a function"
        )
    return {"type": "function", "function": {"name": given.get("name")}}


def _reasoning(given: Mapping[str, Any]) -> dict[str, Any] | None:
    fields = without_nulls(given)
    for name in ("summary", "generate_summary"):
        if fields.pop(name, "auto") != "auto":
            raise InvalidArgument(f"reasoning.{name}", "is not supported: items of type reasoning have the full text")
    return fields or None


def _logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    wanted = list_in(body, "include")
    for one in wanted:
        if one != LOGPROBS and one not in _ABSENT:
            raise InvalidArgument("include", f"{str(one)[:_MAX_SHOWN]!r} is not supported: only {LOGPROBS!r} is")
    if LOGPROBS in wanted:
        return {"logprobs": True, "top_logprobs": body.get("top_logprobs", 0)}
    if body.get("top_logprobs", 0) != 0:
        raise InvalidArgument("top_logprobs", f"needs {LOGPROBS!r} in include")
    return {}


def _metadata(given: Any) -> dict[str, str]:
    """Return the caller's metadata, which the answer repeats."""
    if not isinstance(given, dict) or len(given) > MAX_METADATA:
        raise InvalidArgument("metadata", f"must be an object of at most {MAX_METADATA} strings")
    for name, text in given.items():
        if not isinstance(text, str) or max(len(name), len(text)) > MAX_METADATA_CHARS:
            problem = f"must be a string of at most {MAX_METADATA_CHARS} characters"
            raise InvalidArgument(f"metadata.{name[:_MAX_SHOWN]}", problem)
    return given


def _in_their_words(error: InvalidArgument) -> InvalidArgument:
    """Rename the chat field of an error to its name in responses."""
    field = error.field.replace("].function.", "].").replace("response_format.json_schema", "text.format")
    first = field.partition(".")[0].partition("[")[0]
    return type(error)(_THEIRS.get(first, first) + field.removeprefix(first), error.problem)


def message_item(request_id: str, number: int, text: str, logprobs: Iterable[object], status: str) -> dict[str, Any]:
    """Return the assistant's content as an item."""
    return {
        "id": f"msg_{request_id}_{number}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [] if status == "in_progress" else [text_part(text, logprobs)],
    }


def text_part(text: str, logprobs: Iterable[object]) -> dict[str, Any]:
    """Return a text as a part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def reasoning_item(request_id: str, number: int, text: str, status: str) -> dict[str, Any]:
    """Return the reasoning as an item."""
    content = [] if status == "in_progress" else [{"type": "reasoning_text", "text": text}]
    return {
        "id": f"rs_{request_id}_{number}",
        "type": "reasoning",
        "summary": [],
        "content": content,
        "encrypted_content": None,
        "status": status,
    }


def call_item(request_id: str, number: int, call: ToolCall, status: str) -> dict[str, Any]:
    """Return a call as an item."""
    return {
        "id": f"fc_{request_id}_{number}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }


def build_logprobs(positions: Sequence[PositionLogprobs], token_text: TokenText) -> Items:
    """Return the log-probabilities of a text's tokens."""
    found: Items = chat_logprobs(positions, token_text)["content"]
    return found


def get_status(finish_reason: str) -> str:
    """Return the status of a response by the sequence's finish reason."""
    is_cut = finish_reason in (FinishReason.LENGTH.value, FinishReason.ABORT.value)
    return "incomplete" if is_cut else "completed"


def build_items(request_id: str, output: CompletionOutput, token_text: TokenText) -> list[dict[str, Any]]:
    """Return the items of an answer: reasoning, content, calls; the last one is incomplete if it is truncated."""
    parts: list[tuple[str, Any]] = []
    if output.reasoning_content:
        parts.append(("reasoning", output.reasoning_content))
    if output.text or not (output.reasoning_content or output.tool_calls):
        parts.append(("message", output.text))
    parts += [("call", call) for call in output.tool_calls]
    items = []
    for number, (kind, value) in enumerate(parts):
        status = get_status(output.finish_reason or "") if number == len(parts) - 1 else "completed"
        if kind == "reasoning":
            items.append(reasoning_item(request_id, number, value, status))
        elif kind == "message":
            items.append(
                message_item(request_id, number, value, build_logprobs(output.logprobs or (), token_text), status)
            )
        else:
            items.append(call_item(request_id, number, value, status))
    return items


def build_usage(usage: Usage, num_reasoning_tokens: int) -> dict[str, Any]:
    """Return the usage of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def response_body(
    heading: ResponseMetadata,
    echoed: Mapping[str, Any],
    items: Sequence[Mapping[str, Any]],
    *,
    finish_reason: str | None = None,
    usage: Mapping[str, Any] | None = None,
    error: JpagedError | None = None,
) -> dict[str, Any]:
    """Return a response body; without a finish reason and an error it is in progress."""
    status = "in_progress" if finish_reason is None else get_status(finish_reason)
    is_cut = finish_reason == FinishReason.LENGTH.value
    return {
        "id": f"resp_{heading.request_id}",
        "object": "response",
        "created_at": heading.created,
        "status": "failed" if error is not None else status,
        "background": False,
        "error": None if error is None else {"code": get_reason(error), "message": str(error)},
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": heading.model,
        "output": list(items),
        "previous_response_id": None,
        "store": False,
        "truncation": "disabled",
        "usage": usage,
        **echoed,
    }


def build_response(
    heading: ResponseMetadata,
    echoed: Mapping[str, Any],
    output: RequestOutput,
    token_text: TokenText,
    num_reasoning_tokens: int,
) -> dict[str, Any]:
    """Return the response of a finished request."""
    (one,) = output.outputs
    items = build_items(heading.request_id, one, token_text)
    usage = build_usage(output.usage, num_reasoning_tokens)
    return response_body(heading, echoed, items, finish_reason=one.finish_reason, usage=usage)


_REASONING, _MESSAGE, _CALL = "reasoning", "message", "call"


class ResponseEvents:
    """Builds the events of one response from its request's events. Must not be shared between threads.

    Attributes:
        reasoning: the reasoning so far.
    """

    def __init__(self, heading: ResponseMetadata, echoed: Mapping[str, Any], token_text: TokenText) -> None:
        self.reasoning = ""
        self._heading = heading
        self._echoed = echoed
        self._token_text = token_text
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._kind = ""
        self._call_index = -1
        self._call = ToolCall("", "", "")
        self._text = ""
        self._logprobs: list[object] = []
        self._unsent: list[object] = []
        self._usage = Usage()
        self._finish_reason = ""

    def begin(self) -> bytes:
        """Return the first events."""
        body = response_body(self._heading, self._echoed, ())
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def of(self, event: OutputEvent) -> bytes:
        """Return the events for an event of the request."""
        return b"".join(self._iter_events(event))

    def end(self, num_reasoning_tokens: int) -> bytes:
        """Return the last events."""
        usage = build_usage(self._usage, num_reasoning_tokens)
        body = response_body(self._heading, self._echoed, self._items, finish_reason=self._finish_reason, usage=usage)
        return self._event(f"response.{body['status']}", response=body)

    def failed(self, error: JpagedError) -> bytes:
        """Return the last event of a failed response."""
        parts = list(self._close("incomplete"))
        body = response_body(self._heading, self._echoed, self._items, error=error)
        return b"".join([*parts, self._event("response.failed", response=body)])

    def _iter_events(self, event: OutputEvent) -> Iterator[bytes]:
        self._usage = event.usage
        self._unsent += build_logprobs(event.logprobs, self._token_text)
        if event.reasoning_content:
            self.reasoning += event.reasoning_content
            yield from self._open(_REASONING)
            yield self._delta("response.reasoning_text.delta", event.reasoning_content, content_index=0)
        if event.text:
            yield from self._open(_MESSAGE)
            told, self._unsent = self._unsent, []
            self._logprobs += told
            yield self._delta("response.output_text.delta", event.text, content_index=0, logprobs=told)
        for piece in event.tool_calls:
            yield from self._of_call(piece)
        if event.finish is not None:
            self._finish_reason = event.finish.reason.value
            if not self._kind:
                yield from self._open(_MESSAGE)
            yield from self._close(get_status(self._finish_reason))

    def _of_call(self, piece: ToolCallPiece) -> Iterator[bytes]:
        if self._kind != _CALL or piece.index != self._call_index:
            yield from self._close("completed")
            self._call_index, self._call = piece.index, ToolCall(piece.id or "", piece.name or "", "")
            yield from self._open(_CALL)
        if piece.arguments:
            yield self._delta("response.function_call_arguments.delta", piece.arguments)

    def _open(self, kind: str) -> Iterator[bytes]:
        """Begin an item unless one of this kind is open; complete the previous one."""
        if self._kind == kind:
            return
        yield from self._close("completed")
        self._kind = kind
        self._items.append(self._item("in_progress"))
        yield self._event("response.output_item.added", output_index=self._index, item=self._items[-1])
        if kind != _CALL:
            yield self._of_item("response.content_part.added", content_index=0, part=self._part(""))

    def _close(self, status: str) -> Iterator[bytes]:
        if not self._kind:
            return
        text = self._text
        if self._kind == _CALL:
            yield self._of_item("response.function_call_arguments.done", arguments=text, name=self._call.name)
        elif self._kind == _REASONING:
            yield self._of_item("response.reasoning_text.done", content_index=0, text=text)
        else:
            self._logprobs += self._unsent
            self._unsent = []
            yield self._of_item("response.output_text.done", content_index=0, text=text, logprobs=self._logprobs)
        if self._kind != _CALL:
            yield self._of_item("response.content_part.done", content_index=0, part=self._part(text))
        self._items[-1] = self._item(status)
        yield self._event("response.output_item.done", output_index=self._index, item=self._items[-1])
        self._kind, self._text, self._logprobs = "", "", []

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _item(self, status: str) -> dict[str, Any]:
        request_id, number = self._heading.request_id, len(self._items) - (status != "in_progress")
        if self._kind == _REASONING:
            return reasoning_item(request_id, number, self._text, status)
        if self._kind == _MESSAGE:
            return message_item(request_id, number, self._text, self._logprobs, status)
        call = ToolCall(self._call.id, self._call.name, self._text)
        return call_item(request_id, number, call, status)

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind == _REASONING:
            return {"type": "reasoning_text", "text": text}
        return text_part(text, self._logprobs)

    def _delta(self, kind: str, delta: str, **fields: object) -> bytes:
        self._text += delta
        return self._of_item(kind, delta=delta, **fields)

    def _of_item(self, kind: str, **fields: object) -> bytes:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=self._index, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        value = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"".join((b"event: ", kind.encode(), b"\ndata: ", *json_text.pieces(value), b"\n\n"))
