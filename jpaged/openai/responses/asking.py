"""Bodies of /v1/responses -> chats. OpenAI's format: https://platform.openai.com/docs/api-reference.

Nothing is stored: `store` may have either value, and is false in answers. Features that need a store, and OpenAI's
built-in ones (tools, summaries, moderation), are rejected by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jpaged.errors import InvalidArgument
from jpaged.openai.bodies import OF_CHATS, Job, chat_job, without_nulls
from jpaged.openai.neutral_fields import own_fields
from jpaged.openai.responses.items import messages_of

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
_MAX_SHOWN = 80
_OWN = frozenset(
    {
        *("input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "include", "top_logprobs"),
        *("metadata", "stream", "stream_options", "reasoning"),
    }
)
_OF_CHATS = OF_CHATS - {
    *("messages", "n", "best_of", "beam_width", "logprobs", "prompt_logprobs", "max_tokens", "max_completion_tokens"),
    *("response_format", "reasoning_effort"),
}
"""Fields that a chat has under the same name."""
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
class Asking:
    """A parsed body, as a chat and as the answer repeats it.

    Attributes:
        echoed: fields of the body that the answer repeats.
    """

    job: Job
    echoed: Mapping[str, Any]


def asking_of(given: Mapping[str, Any]) -> Asking:
    """Parse a body of /v1/responses.

    Raises:
        InvalidArgument: a field is unknown, invalid, or cannot be honored.
    """
    body = own_fields("/v1/responses", given, _OWN | _OF_CHATS)
    instructions = body.get("instructions")
    if not isinstance(instructions, str | None):
        raise InvalidArgument("instructions", f"{str(instructions)[:_MAX_SHOWN]!r} is not a string")
    metadata, reasoning = _metadata(body.get("metadata", {})), _object(body, "reasoning")
    text_format = _text_format(_object(body, "text"))
    chat = {name: value for name, value in body.items() if name not in _OWN}
    chat |= {
        "messages": messages_of(body.get("input"), instructions),
        "max_completion_tokens": body.get("max_output_tokens"),
        "stream": body.get("stream"),
        "stream_options": _stream_options(body),
        "tools": [_tool(f"tools[{i}]", one) for i, one in enumerate(_list(body, "tools"))] or None,
        "tool_choice": _tool_choice(body.get("tool_choice")),
        "response_format": _response_format(text_format),
        "reasoning": _reasoning(reasoning),
        **_logprobs(body),
    }
    try:
        job = chat_job(chat)
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
        "tools": _list(body, "tools"),
        "top_logprobs": body.get("top_logprobs", 0),
        "top_p": sampling.top_p,
        "user": job.user,
        "metadata": metadata,
    }
    return Asking(replace(job, names={**job.names, **told}), echoed)


def _stream_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stream options for a chat: a response ends with its usage in any case."""
    options = _object(body, "stream_options")
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
    wanted = _list(body, "include")
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


def _object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name, {})
    if not isinstance(value, dict):
        raise InvalidArgument(name, "must be an object")
    return without_nulls(value)


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name, [])
    if not isinstance(value, list):
        raise InvalidArgument(name, "must be a list")
    return value


def _in_their_words(error: InvalidArgument) -> InvalidArgument:
    """Rename the chat field of an error to its name in responses."""
    field = error.field.replace("].function.", "].").replace("response_format.json_schema", "text.format")
    first = field.partition(".")[0].partition("[")[0]
    return type(error)(_THEIRS.get(first, first) + field.removeprefix(first), error.problem)
