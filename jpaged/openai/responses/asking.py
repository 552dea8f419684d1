"""What a body of /v1/responses asks for: a chat, in other words. OpenAI's: https://platform.openai.com/docs/api-reference.

Nothing is stored: `store` may say what it likes, and the answer says false. What needs a store, and what OpenAI runs
beside the model (tools of its own, summaries, moderation), is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jpaged.errors import InvalidArgument
from jpaged.openai.bodies import Job, chat_job, flag_in, without_nulls
from jpaged.openai.responses.items import messages_of

LOGPROBS = "message.output_text.logprobs"
"""What `include` asks for with it: the log-probabilities of the text."""
MAX_METADATA = 16
MAX_METADATA_CHARS = 512
_MAX_SHOWN = 80
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
}
"""Fields that say what happens anyway, with these values and no others."""
_REFUSED = {
    "previous_response_id": "nothing is stored: send the conversation whole, outputs of earlier responses in `input`",
    "conversation": "nothing is stored: send the conversation whole in `input`",
    "background": "nothing is stored: wait for the answer, or stream it; /v1/batches run without their caller",
    "prompt": "no templates of prompts are stored: send `instructions` and `input`",
    "truncation": "a conversation that is too long is refused: leave items of `input` out",
    "max_tool_calls": "functions are called by you: stop when there were enough",
    "context_management": "conversations are not shortened here: leave items of `input` out",
    "prompt_cache_key": "prefixes are cached anyway; cache_salt keeps them apart",
    "safety_identifier": "use user",
    "moderation": "texts are not moderated",
    "n": "a response is one answer",
    "best_of": "a response is one answer",
    "beam_width": "a response is one answer, drawn token by token",
    "prompt_logprobs": "use /v1/chat/completions",
    "logprobs": f"use include with {LOGPROBS!r}, and top_logprobs",
    "messages": "is `input` here",
    "max_tokens": "is `max_output_tokens` here",
    "max_completion_tokens": "is `max_output_tokens` here",
    "response_format": "is `text.format` here",
    "reasoning_effort": "is `reasoning.effort` here",
}
_OWN = frozenset(
    {
        *("input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "include", "top_logprobs"),
        *("metadata", "store", "stream", "stream_options", "reasoning"),
    }
)
_THEIRS = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "structured_outputs": "text.format",
    "messages": "input",
}
"""What a chat calls fields that a response has another name for."""
_TOOL_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class Asking:
    """A body, as a chat and as its answer repeats it.

    Attributes:
        echoed: the fields that an answer has of it.
    """

    job: Job
    echoed: Mapping[str, Any]


def asking_of(given: Mapping[str, Any]) -> Asking:
    """Read a body of /v1/responses.

    Raises:
        InvalidArgument: a field is unknown, wrong, or cannot be honoured.
    """
    body = without_nulls(given)
    _check_neutral(body)
    instructions = body.get("instructions")
    if not isinstance(instructions, str | None):
        raise InvalidArgument("instructions", f"{str(instructions)[:_MAX_SHOWN]!r} is not a text")
    flag_in(body, "store")
    metadata, reasoning = _metadata(body.get("metadata", {})), _object(body, "reasoning")
    text_format = _text_format(_object(body, "text"))
    chat = {name: value for name, value in body.items() if name not in _OWN}
    chat |= {
        "messages": messages_of(body.get("input"), instructions),
        "max_completion_tokens": body.get("max_output_tokens"),
        "stream": body.get("stream"),
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
    names = {"max_tokens": "max_output_tokens", "structured_outputs": "text.format"}
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


def _check_neutral(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name] or isinstance(value, bool) != isinstance(_NEUTRAL[name][0], bool):
                why = f": {_REFUSED[name]}" if name in _REFUSED else ""
                only = " or ".join(map(repr, _NEUTRAL[name]))
                raise InvalidArgument(name, f"{str(value)[:_MAX_SHOWN]!r} is not supported, only {only}{why}")
        elif name in _REFUSED:
            raise InvalidArgument(name, f"is not supported: {_REFUSED[name]}")
    options = _object(body, "stream_options")
    if options and not flag_in(body, "stream"):
        raise InvalidArgument("stream_options", "needs stream to be true")
    for name, value in options.items():
        if name != "include_obfuscation" or value is not False:
            raise InvalidArgument(
                f"stream_options.{name[:_MAX_SHOWN]}", "is not supported, but for include_obfuscation of false"
            )


def _text_format(text: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in text.items():
        if name == "verbosity" and value != "medium":
            raise InvalidArgument("text.verbosity", "is not supported: say in the instructions how long answers are")
        if name not in ("format", "verbosity"):
            raise InvalidArgument(f"text.{name[:_MAX_SHOWN]}", "is not supported; format is")
    given = text.get("format", {"type": "text"})
    if not isinstance(given, dict) or given.get("type") not in ("text", "json_object", "json_schema"):
        raise InvalidArgument("text.format", "must be an object whose type is text, json_object or json_schema")
    return given


def _response_format(text_format: Mapping[str, Any]) -> dict[str, Any]:
    """The same as chats have it: a schema lies in an object of its own there."""
    if text_format["type"] != "json_schema":
        return dict(text_format)
    return {"type": "json_schema", "json_schema": {k: v for k, v in text_format.items() if k != "type"}}


def _tool(where: str, given: Any) -> dict[str, Any]:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind != "function":
        problem = f"{str(kind)[:_MAX_SHOWN]!r} is not supported: only tools of type 'function' are, which you run"
        raise InvalidArgument(f"{where}.type", problem)
    for name, value in given.items():
        if name != "type" and name not in _TOOL_FIELDS and value is not None:
            raise InvalidArgument(f"{where}.{name[:_MAX_SHOWN]}", f"is not supported; {', '.join(_TOOL_FIELDS)} are")
    return {"type": "function", "function": {name: given[name] for name in _TOOL_FIELDS if name in given}}


def _tool_choice(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    if given.get("type") != "function" or given.keys() - {"type", "name"}:
        shown = str(given.get("type"))[:_MAX_SHOWN]
        raise InvalidArgument(
            "tool_choice", f"{shown!r} is not supported: 'none', 'auto', 'required' and a function are"
        )
    return {"type": "function", "function": {"name": given.get("name")}}


def _reasoning(given: Mapping[str, Any]) -> dict[str, Any] | None:
    fields = without_nulls(given)
    for name in ("summary", "generate_summary"):
        if name in fields:
            raise InvalidArgument(f"reasoning.{name}", "is not supported: items of type reasoning have all of it")
    return fields or None


def _logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    wanted = _list(body, "include")
    for one in wanted:
        if one != LOGPROBS:
            raise InvalidArgument("include", f"{str(one)[:_MAX_SHOWN]!r} is not supported: only {LOGPROBS!r} is")
    if "top_logprobs" in body and not wanted and body["top_logprobs"] != 0:
        raise InvalidArgument("top_logprobs", f"needs include to have {LOGPROBS!r}")
    return {"logprobs": True, "top_logprobs": body.get("top_logprobs", 0)} if wanted else {}


def _metadata(given: Any) -> dict[str, str]:
    """Notes of the caller's, which the answer repeats."""
    if not isinstance(given, dict) or len(given) > MAX_METADATA:
        raise InvalidArgument("metadata", f"must be an object of at most {MAX_METADATA} texts")
    for name, text in given.items():
        if not isinstance(text, str) or max(len(name), len(text)) > MAX_METADATA_CHARS:
            problem = f"must be a text of at most {MAX_METADATA_CHARS} characters"
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
    """An error of a chat's field by the name that responses have for it."""
    field = error.field.replace("].function.", "].").replace("response_format.json_schema", "text.format")
    first = field.partition(".")[0].partition("[")[0]
    return type(error)(_THEIRS.get(first, first) + field.removeprefix(first), error.problem)
