"""Bodies of /v1/responses, whole and as events. OpenAI's format: https://platform.openai.com/docs/api-reference.

A conversation is sent whole with each call, or continues a stored response, whose items come first. Tools and items of
tools that OpenAI's servers run are ignored with a warning; features without an equivalent are rejected by name.

`response_input.py` converts items and tools.

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

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jpaged import json_text
from jpaged.chat import ChatMessages, ToolCall, ToolCallPiece, join_contents
from jpaged.errors import InvalidArgument, JpagedError, RequestTooLong, TryLater
from jpaged.json_text import Items
from jpaged.openai.chat_tools import custom_input
from jpaged.openai.request import OF_CHATS, Job, chat_job, flag_in, list_in, object_in, own_fields, thinking_kwargs
from jpaged.openai.response import ResponseMetadata, TokenText, chat_logprobs
from jpaged.openai.response_input import (
    ClientTool,
    FieldPolicy,
    FindItem,
    ItemConverter,
    ResponseTools,
    find_nothing,
    flat_name,
    seal_reasoning,
)
from jpaged.sampling_params import NO_DEFAULTS
from jpaged.types import CompletionOutput, FinishReason, OutputEvent, PositionLogprobs, RequestOutput, Usage

_MAX_SHOWN = 80
LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that requests the log-probabilities of the text."""
ENCRYPTED = "reasoning.encrypted_content"
"""Value of `include` that requests the reasoning as opaque content, which clients send back."""
ABSENT = (
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("code_interpreter_call.outputs", "message.input_image.image_url", "computer_call_output.output.image_url"),
)
"""Values of `include` for items of kinds that answers do not have."""
_SUMMARIES = ("auto", "concise", "detailed", "none")
SUMMARY_FIELDS = frozenset({"summary", "generate_summary"})
_MODES = frozenset({"context", "mode"})
REASONING_FIELDS = frozenset({"effort", "enabled", "thinking_token_budget", "include", *SUMMARY_FIELDS, *_MODES})
_CONTEXTS = {"auto": None, "all_turns": True, "current_turn": False}
"""Values of `reasoning.context`: keep the reasoning of earlier turns, drop it, or leave it to the chat template."""
TEXT_FIELDS = frozenset({"format", "verbosity"})
_STREAM_FIELDS = frozenset({"include_obfuscation", "include_usage", "continuous_usage_stats"})
_REPEATED = ("prompt_cache_key", "safety_identifier", "max_tool_calls")
"""Fields without an effect that the answer repeats."""
MAX_METADATA = 16
MAX_METADATA_CHARS = 512
_OWN = frozenset(
    {
        *("input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "include", "top_logprobs"),
        *("metadata", "stream", "stream_options", "reasoning", "store", "background", "previous_response_id"),
        "truncation",
    }
)
_OF_CHATS = OF_CHATS - {
    *("messages", "n", "best_of", "beam_width", "logprobs", "prompt_logprobs", "max_tokens", "max_completion_tokens"),
    *("response_format", "reasoning_effort", "echo", "return_token_ids", "return_tokens_as_token_ids"),
    *("use_beam_search", "functions", "function_call"),
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


@dataclass(frozen=True, slots=True)
class StoredTurns:
    """The conversation that a response continues.

    Attributes:
        read: returns the items of all its turns.
        find_item: returns the stored item of an id; raises NotFound.
    """

    read: Callable[[], Iterable[Mapping[str, Any]]] = tuple
    find_item: FindItem = find_nothing


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A parsed body, as a chat and as the answer repeats it.

    Attributes:
        echoed: fields of the body that the answer repeats.
        items: items of the input.
        renamed: by name of the chat's function, tools that have another name or kind in the response.
        has_encrypted: items of reasoning have the text as encrypted content, too.
        is_stored: the client asks to store the response.
        is_background: the response does not end with the connection.
        warnings: ignored tools and items, with the reason.
        truncates: leave out the oldest turns of a conversation that is too long.
    """

    job: Job
    echoed: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]] = ()
    renamed: Mapping[str, ClientTool] = field(default_factory=dict)
    has_encrypted: bool = False
    is_stored: bool = True
    is_background: bool = False
    warnings: tuple[str, ...] = ()
    truncates: bool = False

    @property
    def has_late_system(self) -> bool:
        """True if a message of the role system is not the first, which some chat templates reject."""
        (prompt,) = self.job.prompts
        return any(one["role"] == "system" for one in (prompt.messages or ())[1:])

    def with_one_system(self) -> Job:
        """Return the job with one message of the role system at most, the first.

        Those at the start are joined, and later ones become reminders in the user's turns, at the same places.
        """
        (prompt,) = self.job.prompts
        messages: list[dict[str, Any]] = []
        texts: list[list[Any]] = []
        for one in prompt.messages or ():
            message, last = dict(one), messages[-1] if messages else None
            if message["role"] == "system" and last is not None and last["role"] != "system":
                content = ["<system-reminder>\n", message["content"], "\n</system-reminder>"]
                message = {"role": "user", "content": join_contents(content)}
            if last is not None and message["role"] == last["role"] and message["role"] in ("system", "user"):
                texts[-1].append(message["content"])
            else:
                messages.append(message)
                texts.append([message["content"]])
        for message, parts in zip(messages, texts, strict=True):
            if len(parts) > 1:
                message["content"] = join_contents(parts, "\n\n")
        return replace(self.job, prompts=(replace(prompt, messages=ChatMessages(messages)),))


def parse_responses_request(
    given: Mapping[str, Any], defaults: Mapping[str, Any] = NO_DEFAULTS, stored: StoredTurns | None = None
) -> ResponsesRequest:
    """Parse a body of /v1/responses.

    Args:
        defaults: the model's sampling defaults, for fields that the body leaves out.
        stored: the conversation of `previous_response_id`, and stored items.

    Raises:
        InvalidArgument: a field is unknown, invalid, or cannot be honored.
        NotFound: an item refers to one that is not stored.
    """
    body = own_fields("/v1/responses", given, OF_RESPONSES)
    policy, stored = FieldPolicy.of_body(body), stored or StoredTurns()
    instructions = body.get("instructions")
    if not isinstance(instructions, str | None):
        raise InvalidArgument("instructions", f"{str(instructions)[:_MAX_SHOWN]!r} is not a string")
    is_stored, is_background = flag_in(body, "store", default=True), flag_in(body, "background")
    if is_background and not is_stored:
        raise InvalidArgument("background", "background can only be used when `store` is true")
    metadata, reasoning, text = (
        _metadata(body.get("metadata", {})),
        _reasoning_in(body, policy),
        object_in(body, "text"),
    )
    text_format, included = _text_format(text, policy), _included(body)
    tools = ResponseTools(policy)
    for i, one in enumerate(list_in(body, "tools")):
        tools.add(f"tools[{i}]", one)
    conversation = ItemConverter(policy, tools, stored.find_item)
    if instructions is not None:
        conversation.add_instructions(instructions)
    conversation.add_stored(stored.read())
    conversation.add_input(body.get("input"))
    chat = {name: value for name, value in body.items() if name not in _OWN}
    chat |= {
        "messages": conversation.end(),
        "max_completion_tokens": body.get("max_output_tokens"),
        "stream": body.get("stream"),
        "stream_options": _stream_options(body, policy),
        "tool_choice": _tool_choice(body.get("tool_choice"), tools),
        "tools": tools.functions or None,
        "response_format": _response_format(text_format),
        "reasoning": {name: one for name, one in reasoning.items() if name not in SUMMARY_FIELDS | _MODES} or None,
        "chat_template_kwargs": _template_kwargs(reasoning, body.get("chat_template_kwargs")),
        **_logprobs(body, included),
    }
    try:
        job = chat_job(chat, defaults)
    except InvalidArgument as error:
        raise _in_their_words(error, tools) from error
    names = {"max_tokens": "max_output_tokens", "structured_outputs": "text.format", "prompt": "input"}
    theirs = {name: one for name, one in names.items() if name in job.names}
    return ResponsesRequest(
        replace(job, names={**job.names, **theirs}),
        _echoed(body, given, job) | {"metadata": metadata, "text": _echoed_text(text, text_format)},
        items=conversation.items,
        renamed=tools.renamed,
        has_encrypted=ENCRYPTED in included,
        is_stored=is_stored,
        is_background=is_background,
        warnings=tuple(tools.warnings),
        truncates=_truncation(body) == "auto",
    )


def _truncation(body: Mapping[str, Any]) -> str:
    value: str = body.get("truncation", "disabled")
    if value not in ("auto", "disabled"):
        raise InvalidArgument("truncation", f"{str(value)[:_MAX_SHOWN]!r} is not 'auto' or 'disabled'")
    return value


def _echoed(body: Mapping[str, Any], given: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """Return fields of a body as the answer repeats them."""
    options, sampling = job.prompts[0].chat_options, job.sampling
    return {
        "background": body.get("background", False),
        "previous_response_id": body.get("previous_response_id"),
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "parallel_tool_calls": options.parallel_tool_calls,
        "reasoning": {"effort": options.reasoning.effort, "summary": object_in(body, "reasoning").get("summary")},
        "temperature": sampling.temperature,
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": list_in(body, "tools"),
        "top_logprobs": body.get("top_logprobs", 0),
        "top_p": sampling.top_p,
        "truncation": _truncation(body),
        "user": job.user,
        **{name: given[name] for name in _REPEATED if given.get(name) is not None},
    }


def _echoed_text(text: Mapping[str, Any], text_format: Mapping[str, Any]) -> dict[str, Any]:
    verbosity = {"verbosity": text["verbosity"]} if "verbosity" in text else {}
    return {"format": text_format, **verbosity}


def _stream_options(body: Mapping[str, Any], policy: FieldPolicy) -> dict[str, Any]:
    """Return the stream options for a chat: a response ends with its usage in any case."""
    options = object_in(body, "stream_options")
    policy.check("stream_options", options, _STREAM_FIELDS)
    for name in ("include_usage", "continuous_usage_stats"):
        if options.get(name) not in (None, False):
            raise InvalidArgument(f"stream_options.{name}", "is not supported: a response ends with its usage")
    return {name: value for name, value in options.items() if name in _STREAM_FIELDS}


def _text_format(text: Mapping[str, Any], policy: FieldPolicy) -> dict[str, Any]:
    policy.check("text", text, TEXT_FIELDS)
    verbosity = text.get("verbosity", "medium")
    if verbosity not in ("low", "medium", "high"):
        raise InvalidArgument("text.verbosity", f"{str(verbosity)[:_MAX_SHOWN]!r} is not one of low, medium, high")
    given = text.get("format", {"type": "text"})
    if not isinstance(given, dict) or given.get("type") not in ("text", "json_object", "json_schema"):
        raise InvalidArgument("text.format", "must be an object whose type is text, json_object or json_schema")
    return given


def _response_format(text_format: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response format of a chat, which nests a schema in another object."""
    if text_format["type"] != "json_schema":
        return dict(text_format)
    return {"type": "json_schema", "json_schema": {k: v for k, v in text_format.items() if k != "type"}}


def _tool_choice(given: Any, tools: ResponseTools) -> Any:
    """Return the tool choice of a chat; one of type allowed_tools removes the other tools."""
    if not isinstance(given, dict):
        return given
    if given.get("type") != "allowed_tools":
        return {"type": "function", "function": {"name": _chosen_name("tool_choice", given)}}
    mode, listed = given.get("mode"), given.get("tools")
    for name in given.keys() - {"type", "mode", "tools"}:
        raise InvalidArgument(f"tool_choice.{str(name)[:_MAX_SHOWN]}", "is not supported; type, mode, tools are")
    if mode not in ("auto", "required"):
        raise InvalidArgument("tool_choice.mode", f"{str(mode)[:_MAX_SHOWN]!r} is not 'auto' or 'required'")
    if not isinstance(listed, list) or not listed:
        raise InvalidArgument("tool_choice.tools", "must be a list with at least one tool")
    names, known = set[str](), {name for one in tools.functions if isinstance(name := one["function"].get("name"), str)}
    for i, one in enumerate(listed):
        if isinstance(one, dict) and one.get("type") in ("function", "custom"):
            name = _chosen_name(f"tool_choice.tools[{i}]", one)
            if not isinstance(name, str) or name not in known:
                problem = f"{str(name)[:_MAX_SHOWN]!r} is the name of none of the tools"
                raise InvalidArgument(f"tool_choice.tools[{i}].name", problem)
            names.add(name)
        elif not isinstance(one, dict) or not isinstance(one.get("type"), str):
            raise InvalidArgument(f"tool_choice.tools[{i}]", "must be an object with a type")
    tools.keep(names)  # others are tools that OpenAI runs, which the server ignores
    return mode


def _chosen_name(where: str, given: Mapping[str, Any]) -> Any:
    """Return the chat's name of a tool of the client."""
    kind, name, namespace = given.get("type"), given.get("name"), given.get("namespace")
    if kind not in ("function", "custom") or given.keys() - {"type", "name", "namespace"}:
        problem = "is not supported: must be 'none', 'auto', 'required', or a function or custom tool of the client"
        raise InvalidArgument(where, f"{str(kind)[:_MAX_SHOWN]!r} {problem}")
    return flat_name(name, namespace) if isinstance(name, str) and isinstance(namespace, str) else name


def _reasoning_in(body: Mapping[str, Any], policy: FieldPolicy) -> dict[str, Any]:
    """Return the reasoning options. A summary is never written: items of reasoning have the full text."""
    given = object_in(body, "reasoning")
    policy.check("reasoning", given, REASONING_FIELDS)
    for name in sorted(SUMMARY_FIELDS):
        if given.get(name, "auto") not in _SUMMARIES:
            shown = str(given[name])[:_MAX_SHOWN]
            raise InvalidArgument(f"reasoning.{name}", f"{shown!r} is not one of {', '.join(_SUMMARIES)}")
    if given.get("mode", "standard") != "standard":
        raise InvalidArgument(
            "reasoning.mode", f"{str(given['mode'])[:_MAX_SHOWN]!r} is not supported, only 'standard'"
        )
    context = given.get("context", "auto")
    if not isinstance(context, str) or context not in _CONTEXTS:
        shown = str(context)[:_MAX_SHOWN]
        raise InvalidArgument("reasoning.context", f"{shown!r} is not one of {', '.join(_CONTEXTS)}")
    return {name: value for name, value in given.items() if name in REASONING_FIELDS}


def _template_kwargs(reasoning: Mapping[str, Any], given: Any) -> Any:
    """Return the variables of the chat template: those of the body, and those of `reasoning.context`."""
    found = thinking_kwargs(is_kept=_CONTEXTS[reasoning.get("context", "auto")])
    return {**found, **(given or {})} if found and isinstance(given, Mapping | None) else given


def _included(body: Mapping[str, Any]) -> list[Any]:
    included = list_in(body, "include")
    for one in included:
        if one not in (LOGPROBS, ENCRYPTED, *ABSENT):
            known = f"only {LOGPROBS!r} and {ENCRYPTED!r} are"
            raise InvalidArgument("include", f"{str(one)[:_MAX_SHOWN]!r} is not supported: {known}")
    return included


def _logprobs(body: Mapping[str, Any], included: list[Any]) -> dict[str, Any]:
    if LOGPROBS in included:
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


_NUMBERED = re.compile(r"tools\[(\d+)\](.*)", re.DOTALL)


def _in_their_words(error: InvalidArgument, tools: ResponseTools) -> InvalidArgument:
    """Rename the chat field of an error to its name in responses."""
    field = error.field.replace("].function.", "].").replace("response_format.json_schema", "text.format")
    if found := _NUMBERED.fullmatch(field):
        return type(error)(f"{tools.get_place(int(found[1])) or f'tools[{found[1]}]'}{found[2]}", error.problem)
    first = field.partition(".")[0].partition("[")[0]
    return type(error)(_THEIRS.get(first, first) + field.removeprefix(first), error.problem)


def text_part(text: str, logprobs: Iterable[object]) -> dict[str, Any]:
    """Return a text as a part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def build_logprobs(positions: Sequence[PositionLogprobs], token_text: TokenText) -> Items:
    """Return the log-probabilities of a text's tokens."""
    found: Items = chat_logprobs(positions, token_text)["content"]
    return found


def get_status(finish_reason: str) -> str:
    """Return the status of a response by the sequence's finish reason."""
    is_cut = finish_reason in (FinishReason.LENGTH.value, FinishReason.ABORT.value)
    return "incomplete" if is_cut else "completed"


def _error_code(error: JpagedError) -> str:
    """Return OpenAI's code of an error in a response."""
    if isinstance(error, RequestTooLong):
        return "context_length_exceeded"
    if isinstance(error, InvalidArgument):
        return "invalid_prompt"
    return "rate_limit_exceeded" if isinstance(error, TryLater) else "server_error"


IN_PROGRESS, QUEUED, CANCELLED = "in_progress", "queued", "cancelled"
"""Statuses of a response that has not ended, and of one that a client ended."""


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """Format of the answer to one body.

    Attributes:
        heading: id and model of the answer.
        is_stored: the answer is stored.
    """

    heading: ResponseMetadata
    request: ResponsesRequest
    is_stored: bool = False

    @property
    def response_id(self) -> str:
        """Id of the response."""
        return f"resp_{self.heading.request_id}"

    def body(
        self,
        items: Sequence[Mapping[str, Any]] = (),
        *,
        status: str = IN_PROGRESS,
        finish_reason: str = "",
        usage: Mapping[str, Any] | None = None,
        error: JpagedError | None = None,
    ) -> dict[str, Any]:
        """Return the response."""
        is_cut = finish_reason == FinishReason.LENGTH.value
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.heading.created,
            "status": status if error is None else "failed",
            "error": None if error is None else {"code": _error_code(error), "message": str(error)},
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self.heading.model,
            "output": list(items),
            "store": self.is_stored,
            "usage": usage,
            **self.request.echoed,
        }

    def message_item(self, number: int, text: str, logprobs: Iterable[object], status: str) -> dict[str, Any]:
        """Return the assistant's content as an item."""
        return {
            "id": self._item_id("msg", number),
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [] if status == IN_PROGRESS else [text_part(text, logprobs)],
        }

    def reasoning_item(self, number: int, text: str, status: str) -> dict[str, Any]:
        """Return the reasoning as an item."""
        is_begun = status == IN_PROGRESS
        return {
            "id": self._item_id("rs", number),
            "type": "reasoning",
            "summary": [],
            "content": [] if is_begun else [{"type": "reasoning_text", "text": text}],
            "encrypted_content": seal_reasoning(text) if self.request.has_encrypted and not is_begun else None,
            "status": status,
        }

    def call_item(self, number: int, call: ToolCall, status: str) -> dict[str, Any]:
        """Return a call as an item, with the name and the kind of the tool in the body."""
        tool = self.request.renamed.get(call.name) or ClientTool(call.name)
        fields = {"call_id": call.id, "name": tool.name}
        if tool.namespace is not None:
            fields["namespace"] = tool.namespace
        if tool.is_custom:
            text = "" if status == IN_PROGRESS else custom_input(call.arguments)
            fields = {"id": self._item_id("ctc", number), "type": "custom_tool_call", **fields, "input": text}
        else:
            fields = {"id": self._item_id("fc", number), "type": "function_call", **fields, "arguments": call.arguments}
        return {**fields, "status": status}

    def is_custom(self, name: str) -> bool:
        """Return True if a function stands for a custom tool."""
        tool = self.request.renamed.get(name)
        return tool is not None and tool.is_custom

    def items(self, output: CompletionOutput, token_text: TokenText) -> list[dict[str, Any]]:
        """Return the items of an answer: reasoning, content, calls; the last one is incomplete if it is truncated."""
        parts: list[tuple[str, Any]] = []
        if output.reasoning_content:
            parts.append((_REASONING, output.reasoning_content))
        if output.text or not (output.reasoning_content or output.tool_calls):
            parts.append((_MESSAGE, output.text))
        parts += [(_CALL, call) for call in output.tool_calls]
        items = []
        for number, (kind, value) in enumerate(parts):
            status = get_status(output.finish_reason or "") if number == len(parts) - 1 else "completed"
            if kind == _REASONING:
                items.append(self.reasoning_item(number, value, status))
            elif kind == _MESSAGE:
                logprobs = build_logprobs(output.logprobs or (), token_text)
                items.append(self.message_item(number, value, logprobs, status))
            else:
                items.append(self.call_item(number, value, status))
        return items

    def _item_id(self, prefix: str, number: int) -> str:
        return f"{prefix}_{self.heading.request_id}_{number}"


def build_usage(usage: Usage, num_reasoning_tokens: int) -> dict[str, Any]:
    """Return the usage of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def build_response(
    how: ResponseFormat, output: RequestOutput, token_text: TokenText, num_reasoning_tokens: int
) -> dict[str, Any]:
    """Return the response of a finished request."""
    (one,) = output.outputs
    usage, reason = build_usage(output.usage, num_reasoning_tokens), one.finish_reason or ""
    return how.body(how.items(one, token_text), status=get_status(reason), finish_reason=reason, usage=usage)


_ITEM_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def listed_items(request_id: str, items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of an input as lists show them: with an id, a type, a status, and parts instead of a text."""
    found = []
    for number, item in enumerate(items):
        kind = item.get("type") or "message"
        prefix = _ITEM_PREFIXES.get(kind, "item")
        listed = {"id": f"{prefix}_{request_id}_in{number}", "type": kind, "status": "completed"}
        listed |= {name: value for name, value in item.items() if value is not None}
        if kind == "message" and isinstance(text := item.get("content"), str):
            is_output = item.get("role") == "assistant"
            listed["content"] = [text_part(text, []) if is_output else {"type": "input_text", "text": text}]
        found.append(listed)
    return found


def continued_items(output: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of an answer as a next input has them, without log-probabilities."""
    found = []
    for item in output:
        kept = dict(item)
        if item["type"] == "message":
            kept["content"] = [{**part, "logprobs": []} for part in item["content"]]
        found.append(kept)
    return found


_REASONING, _MESSAGE, _CALL = "reasoning", "message", "call"


class ResponseEvents:
    """Builds the events of one response from its request's events. Must not be shared between threads.

    Attributes:
        reasoning: the reasoning so far.
        items: the items so far; the last one may be in progress.
        size: approximate number of characters so far.
    """

    def __init__(self, how: ResponseFormat, token_text: TokenText) -> None:
        self.reasoning = ""
        self.items: list[dict[str, Any]] = []
        self.size = 0
        self._how = how
        self._token_text = token_text
        self._number = 0
        self._kind = ""
        self._call_index = -1
        self._call = ToolCall("", "", "")
        self._text = ""
        self._logprobs: list[object] = []
        self._unsent: list[object] = []
        self._usage = Usage()
        self._finish_reason = ""

    @property
    def status(self) -> str:
        """Status of the response of a request that has ended."""
        return get_status(self._finish_reason)

    def begin(self) -> bytes:
        """Return the first events."""
        return self._event("response.created", response=self._how.body()) + self.start()

    def queue(self) -> bytes:
        """Return the first events of a response in the background; `start` returns the next one."""
        body = self._how.body(status=QUEUED)
        return self._event("response.created", response=body) + self._event("response.queued", response=body)

    def start(self) -> bytes:
        """Return the event of a response that begins to generate."""
        return self._event("response.in_progress", response=self._how.body())

    def of(self, event: OutputEvent) -> bytes:
        """Return the events for an event of the request."""
        return b"".join(self._iter_events(event))

    def end(self, num_reasoning_tokens: int, *, is_stored: bool) -> dict[str, Any]:
        """Return the response of a request that has ended."""
        usage, reason = build_usage(self._usage, num_reasoning_tokens), self._finish_reason
        how = replace(self._how, is_stored=is_stored)
        return how.body(self.items, status=get_status(reason), finish_reason=reason, usage=usage)

    def fail(self, error: JpagedError, *, is_stored: bool) -> tuple[bytes, dict[str, Any]]:
        """Return the events that end the open item, and the response of a failed request."""
        events = b"".join(self._close("incomplete"))
        return events, replace(self._how, is_stored=is_stored).body(self.items, error=error)

    def cancel(self) -> tuple[bytes, dict[str, Any]]:
        """Return the same for a request that a client cancelled."""
        return b"".join(self._close("incomplete")), self._how.body(self.items, status=CANCELLED)

    def last(self, status: str, encoded: bytes) -> bytes:
        """Return the last event, with a response that is already encoded."""
        kind = "incomplete" if status == CANCELLED else status
        before, _, after = self._event(f"response.{kind}", response=_MARK).partition(json_text.quoted(_MARK))
        return b"".join((before, encoded, after))

    def _iter_events(self, event: OutputEvent) -> Iterator[bytes]:
        self._usage = event.usage
        self._unsent += build_logprobs(event.logprobs, self._token_text)
        self.size += 10 * len(event.logprobs)
        if event.reasoning_content:
            self.reasoning += event.reasoning_content
            yield from self._open(_REASONING)
            yield self._delta("response.reasoning_text.delta", event.reasoning_content, content_index=0)
        if event.text:
            yield from self._open(_MESSAGE)
            added, self._unsent = self._unsent, []
            self._logprobs += added
            yield self._delta("response.output_text.delta", event.text, content_index=0, logprobs=added)
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
        if piece.arguments and self._how.is_custom(self._call.name):
            self.size += len(piece.arguments)
            self._text += piece.arguments  # the text is one of their values: it is sent when they are complete
        elif piece.arguments:
            yield self._delta("response.function_call_arguments.delta", piece.arguments)

    def _open(self, kind: str) -> Iterator[bytes]:
        """Begin an item unless one of this kind is open; complete the previous one."""
        if self._kind == kind:
            return
        yield from self._close("completed")
        self._kind = kind
        self.items.append(self._item(IN_PROGRESS))
        yield self._event("response.output_item.added", output_index=self._index, item=self.items[-1])
        if kind != _CALL:
            yield self._of_item("response.content_part.added", content_index=0, part=self._part(""))

    def _close(self, status: str) -> Iterator[bytes]:
        if not self._kind:
            return
        text = self._text
        item = self._item(status)
        if item["type"] == "custom_tool_call":
            text = item["input"]
            if text:
                yield self._of_item("response.custom_tool_call_input.delta", delta=text)
            yield self._of_item("response.custom_tool_call_input.done", input=text)
        elif self._kind == _CALL:
            yield self._of_item("response.function_call_arguments.done", arguments=text, name=item["name"])
        elif self._kind == _REASONING:
            yield self._of_item("response.reasoning_text.done", content_index=0, text=text)
        else:
            self._logprobs += self._unsent
            self._unsent = []
            yield self._of_item("response.output_text.done", content_index=0, text=text, logprobs=self._logprobs)
        if self._kind != _CALL:
            yield self._of_item("response.content_part.done", content_index=0, part=self._part(text))
        self.items[-1] = item
        yield self._event("response.output_item.done", output_index=self._index, item=item)
        self._kind, self._text, self._logprobs = "", "", []

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _item(self, status: str) -> dict[str, Any]:
        number = len(self.items) - (status != IN_PROGRESS)
        if self._kind == _REASONING:
            return self._how.reasoning_item(number, self._text, status)
        if self._kind == _MESSAGE:
            return self._how.message_item(number, self._text, self._logprobs, status)
        return self._how.call_item(number, ToolCall(self._call.id, self._call.name, self._text), status)

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind == _REASONING:
            return {"type": "reasoning_text", "text": text}
        return text_part(text, self._logprobs)

    def _delta(self, kind: str, delta: str, **fields: object) -> bytes:
        self._text += delta
        self.size += len(delta)
        return self._of_item(kind, delta=delta, **fields)

    def _of_item(self, kind: str, **fields: object) -> bytes:
        return self._event(kind, item_id=self.items[-1]["id"], output_index=self._index, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        value = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"".join((b"event: ", kind.encode(), b"\ndata: ", *json_text.pieces(value), b"\n\n"))


_MARK = "jpaged-mark"
