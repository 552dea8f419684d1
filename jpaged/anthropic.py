"""Bodies of /v1/messages, whole and as events: Anthropic's Messages API over chats. No I/O.

A body becomes the job of a chat, so that everything after it is the path of /v1/chat/completions:

system                            a message of the role system
{"type": "text"}                  the content of a message; blocks of one message are concatenated
{"type": "thinking"}              reasoning before the assistant's turn; redacted_thinking is ignored
{"type": "tool_use"}              a call in the assistant's turn; its input becomes arguments
{"type": "tool_result"}           a message of the role tool, before the other blocks of the user's message
an assistant's message at the end is continued

An answer has the same blocks: thinking, text and tool_use. A stream is a list of events in order:

message_start
  content_block_start, ping                 a block of thinking, text or a call, as it comes
    content_block_delta                     thinking_delta, signature_delta | text_delta | input_json_delta
  content_block_stop
message_delta, message_stop                 stop_reason and usage
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jpaged import json_text
from jpaged.chat import (
    ChatMessages,
    Tool,
    ToolCall,
    ToolCallPiece,
    join_contents,
    json_object,
    read_source_image,
    text_in,
    text_of_parts,
)
from jpaged.errors import InvalidArgument
from jpaged.openai.request import OF_CHATS, Job, LenientBody, chat_job, list_in, object_in, own_fields, thinking_kwargs
from jpaged.openai.response import ResponseMetadata
from jpaged.openai.response_input import join_turns
from jpaged.sampling_params import NO_DEFAULTS
from jpaged.types import FinishReason, OutputEvent, RequestOutput, Usage

MESSAGES_URL = "/v1/messages"
_MAX_SHOWN = 80
_BILLING_HEADER = "x-anthropic-billing-header"
"""Beginning of a line that Claude Code puts before its system prompt, with a hash that differs in every request."""
INVALID_JSON = "INVALID_JSON"
"""Key of an input whose arguments are no JSON object, with their text; Anthropic's convention for such inputs."""
_CLEAR_THINKING = "clear_thinking_20251015"
_OMITTED = "jpaged."
"""Beginning of the signature of an omitted thought, which contains the thought."""
_MAX_INPUT_BYTES = 1 << 30
_BLOCK_FIELDS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"text", "citations", "parsed_output"}),
    "thinking": frozenset({"thinking", "signature"}),
    "redacted_thinking": frozenset({"data"}),
    "tool_use": frozenset({"id", "name", "input", "caller", "toolset_name"}),
    "tool_result": frozenset({"tool_use_id", "content", "is_error", "toolset_name"}),
    "image": frozenset({"source"}),
    "document": frozenset({"source", "title", "context", "citations"}),
    "search_result": frozenset({"content", "source", "title", "citations"}),
    "tool_reference": frozenset({"tool_name"}),
    "tool_addition": frozenset({"tool"}),
    "tool_removal": frozenset({"tool"}),
}
"""Fields of each type of block that is read, in addition to `type` and `cache_control`."""
_OF_ALL_BLOCKS = frozenset({"type", "cache_control"})
_READABLE = ("text", "document", "search_result")
_OF_ROLE: Mapping[str, tuple[str, ...]] = {
    "user": (*_READABLE, "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text", "tool_addition", "tool_removal"),
}
"""Types of blocks in the messages of each role."""
_RESULT_TYPES = (*_READABLE, "image", "tool_reference")
_SYSTEM_FIELDS = frozenset({"role", "content", "clear_at", "output_config"})
_TOOL_FIELDS = frozenset(
    {
        *("name", "description", "input_schema", "strict", "type", "cache_control", "defer_loading"),
        *("eager_input_streaming", "allowed_callers", "input_examples"),
    }
)
_OUTPUT_FIELDS = frozenset({"effort", "format", "task_budget"})
_CHOICE_FIELDS = frozenset({"type", "name", "disable_parallel_tool_use"})
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_THINKING = {
    "enabled": frozenset({"budget_tokens", "display", "block_binding"}),
    "adaptive": frozenset({"display", "block_binding"}),
    "between_tools": frozenset[str](),
    "disabled": frozenset[str](),
}
"""Types of `thinking`, and their fields."""
_DISPLAYS = ("summarized", "omitted", "updates")
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_OWN = frozenset(
    {
        *("messages", "system", "max_tokens", "stop_sequences", "stream", "tools", "tool_choice", "thinking"),
        *("output_config", "output_format", "metadata", "context_management"),
    }
)
_OF_CHATS = OF_CHATS - {
    *("n", "best_of", "beam_width", "use_beam_search", "early_stopping", "length_penalty", "sampling_logprobs"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "return_tokens_as_token_ids"),
    *("max_completion_tokens", "stop", "response_format", "stream_options", "user", "echo", "return_token_ids"),
    *("parallel_tool_calls", "reasoning", "reasoning_effort", "include_reasoning", "thinking_token_budget"),
    *("add_generation_prompt", "continue_final_message", "include_stop_str_in_output", "functions", "function_call"),
}
"""Fields that a chat has under the same name."""
OF_MESSAGES = _OWN | _OF_CHATS
NAMES: Mapping[str, frozenset[str]] = {
    "body.messages[]": _SYSTEM_FIELDS,
    "body.tools[]": _TOOL_FIELDS,
    "body.tool_choice": _CHOICE_FIELDS,
    "body.tool_choice.type": frozenset({*_TOOL_CHOICES, "tool"}),
    "body.thinking": frozenset({"type"}).union(*_THINKING.values()),
    "body.thinking.type": frozenset(_THINKING),
    "body.output_config": _OUTPUT_FIELDS,
    "blocks": frozenset(_BLOCK_FIELDS),
    **{kind: fields | _OF_ALL_BLOCKS for kind, fields in _BLOCK_FIELDS.items()},
}
"""Names that are accepted in each place of a body, types of blocks, and fields of the blocks of each type."""
_IGNORED = frozenset({"cache_control", "citations", "caller", "toolset_name", "parsed_output", "data"})
WITHOUT_EFFECT: Mapping[str, frozenset[str]] = {
    "body.tools[]": _IGNORED | {"defer_loading", "eager_input_streaming", "input_examples"},
    "body.thinking": frozenset({"block_binding"}),
    "body.output_config": frozenset({"task_budget"}),
    "blocks": frozenset({"redacted_thinking"}),
    **{kind: _IGNORED & NAMES[kind] for kind in _BLOCK_FIELDS},
}
"""Names of `NAMES`, and of the body itself, that change nothing."""
_THEIRS = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "response_format": "output_config.format",
    "structured_outputs": "output_config.format",
    "prompt": "messages",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Chat field -> its name in a body of messages."""


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A parsed body.

    Attributes:
        job: the chat. Its limit is `max_tokens`, or what the model's length and the pool allow.
        max_tokens: limit of the body; None to count tokens.
        omits_thinking: blocks of thinking have no text, and the thought is in the signature.
        reports_edits: the answer has `context_management`, without any edit.
        late_systems: indexes of the chat's messages of the role system after the first message.
        tool_numbers: position in the body of each of the chat's tools.
        warnings: fields that were ignored, with the reason.
    """

    job: Job
    max_tokens: int | None
    omits_thinking: bool = False
    reports_edits: bool = False
    late_systems: tuple[int, ...] = ()
    tool_numbers: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()

    def with_reminders(self) -> Job:
        """Return the job with its late system messages as reminders in the user's turns, at the same places.

        For chat templates that reject them. The prompt before each stays as it was, and so do its cached blocks.
        """
        (prompt,) = self.job.prompts
        messages, late = list[Mapping[str, Any]](), frozenset(self.late_systems)
        for i, one in enumerate(prompt.messages or ()):
            reminder = {"role": "user", "content": f"<system-reminder>\n{text_in(one['content'])}\n</system-reminder>"}
            messages.append(reminder if i in late else one)
        return replace(self.job, prompts=(replace(prompt, messages=ChatMessages(map(dict, join_turns(messages)))),))

    def renamed(self, error: InvalidArgument) -> InvalidArgument:
        """Return an error with the body's name of the chat's field."""
        return _renamed(error, self.tool_numbers)


def _without_unknown(body: LenientBody, path: str, value: Any) -> Any:
    """Return messages, blocks or tools without unknown fields, which the body notes."""
    if isinstance(value, list):
        return [_without_unknown(body, path, one) for one in value]
    if not isinstance(value, Mapping):
        return value
    known = NAMES.get(f"body.{path}[]") if path in ("messages", "tools") else NAMES.get(_type_in(value) or "")
    if known is None or (path == "tools" and value.get("type", "custom") != "custom"):
        return value
    for name in sorted(value.keys() - known):
        body.ignore(f"{path}.{name}")
    kept = {name: one for name, one in value.items() if name in known}
    tool = kept.get("tool")
    if isinstance(tool, Mapping) and tool.get("type") == "tool_definition" and "definition" in tool:
        kept["tool"] = {**tool, "definition": _without_unknown(body, "tools", tool["definition"])}
    if path != "tools" and "content" in kept:
        kept["content"] = _without_unknown(body, f"{path}.content", kept["content"])
    return kept


def _renamed(error: InvalidArgument, tool_numbers: Sequence[int]) -> InvalidArgument:
    bare = error.field.removeprefix("sampling.").removeprefix("chat.")
    first, dot, rest = bare.partition(".")
    name, bracket, index = first.partition("[")
    if name == "messages":
        field = bare if ".source." in rest else "messages"  # a chat has other messages than the body, but its images
    elif name == "tools" and bracket and int(index.removesuffix("]")) < len(tool_numbers):
        inner = rest.removeprefix("function.").replace("parameters", "input_schema", 1)
        field = f"tools[{tool_numbers[int(index.removesuffix(']'))]}]{dot}{inner}"
    elif name == "reasoning":
        field = "thinking.budget_tokens" if rest == "thinking_token_budget" else "output_config.effort"
    else:
        field = _THEIRS.get(name, bare)
    return type(error)(field, error.problem)


def parse_messages_request(
    given: Mapping[str, Any], defaults: Mapping[str, Any] = NO_DEFAULTS, *, can_think: bool = True, counts: bool = False
) -> MessagesRequest:
    """Parse a body of /v1/messages.

    Args:
        defaults: the model's sampling defaults, for fields that the body leaves out.
        can_think: the model's reasoning format is known; without one a budget has no effect.
        counts: the body is one of /v1/messages/count_tokens, where `max_tokens` may be absent.

    Raises:
        InvalidArgument: a field is unknown, invalid, or cannot be honored.
    """
    body = own_fields(MESSAGES_URL, given, OF_MESSAGES)
    if isinstance(body, LenientBody):
        for name in ("messages", "tools"):
            body[name] = _without_unknown(body, name, body.get(name, []))
    max_tokens = None if counts and "max_tokens" not in body else _max_tokens(body)
    conversation = _Conversation(body)
    choice, is_parallel = _tool_choice(object_in(body, "tool_choice"), conversation.tools)
    thinking, output = _thinking(object_in(body, "thinking")), _output_config(body)
    effort = conversation.effort or output.get("effort")
    chat = {name: value for name, value in body.items() if name not in _OWN}
    chat |= {
        "messages": conversation.messages,
        "stop": body.get("stop_sequences"),
        "stream": body.get("stream"),
        "tools": [tool for _, tool in conversation.tools.shown] or None,
        "tool_choice": choice,
        "parallel_tool_calls": is_parallel,
        "response_format": _response_format(output),
        "user": object_in(body, "metadata").get("user_id"),
        "reasoning": _reasoning(thinking, effort, can_think=can_think),
        "chat_template_kwargs": _template_kwargs(thinking, body),
        **conversation.continuation,
    }
    numbers = tuple(number for number, _ in conversation.tools.shown)
    try:
        job = chat_job(chat, defaults)
    except InvalidArgument as error:
        raise _renamed(error, numbers) from error
    return MessagesRequest(
        _limited(job, max_tokens),
        max_tokens,
        omits_thinking=thinking.get("display") == "omitted",
        reports_edits=bool(object_in(body, "context_management")),
        late_systems=conversation.late_systems,
        tool_numbers=numbers,
        warnings=conversation.tools.warnings,
    )


def _max_tokens(body: Mapping[str, Any]) -> int:
    value = body.get("max_tokens")
    if type(value) is not int or value < 0:
        problem = "is missing" if value is None else f"{str(value)[:_MAX_SHOWN]} is not an integer of 0 or more"
        raise InvalidArgument("max_tokens", problem)
    return value


def _limited(job: Job, max_tokens: int | None) -> Job:
    """Return the job of a chat without a limit with this one, which may exceed the model's length."""
    names = {"structured_outputs": "output_config.format", "max_tokens": "max_tokens", "prompt": "messages"}
    (prompt,) = job.prompts
    if max_tokens == 0:  # one token is sampled and dropped
        sampling = replace(job.sampling, max_tokens=1, min_tokens=0)
        prompt = replace(prompt, fills_length=False, max_filled=None, is_only_told=True)
        return replace(job, sampling=sampling, prompts=(prompt,), is_only_told=True, names=names)
    return replace(job, prompts=(replace(prompt, max_filled=max_tokens),), names=names)


class _Tools:
    """Tools of a body, and changes of them in system messages.

    Tools that the client does not define with a schema are ignored: the model was not trained on them, or Anthropic's
    servers run them.

    Attributes:
        warnings: a line for each ignored tool.
    """

    def __init__(self, listed: Sequence[Any]) -> None:
        self._tools: dict[str, tuple[int, Tool]] = {}
        self._hosted: dict[str, str] = {}
        self._removed: set[str] = set()
        self.warnings: tuple[str, ...] = ()
        for i, one in enumerate(listed):
            self._add(f"tools[{i}]", i, one)

    @property
    def shown(self) -> list[tuple[int, Tool]]:
        """The tools that the model may call, each with its position in the body."""
        return [one for name, one in self._tools.items() if name not in self._removed]

    def hosted_type(self, name: str) -> str | None:
        """Return the type of an ignored tool; None if there is none of this name."""
        return None if name in self._tools else self._hosted.get(name)

    def change(self, where: str, block: Mapping[str, Any]) -> None:
        """Apply a block that adds or removes a tool from here on."""
        given: Any = block.get("tool")
        kind, is_addition = _type_in(given), block["type"] == "tool_addition"
        if kind == "tool_definition" and is_addition:
            definition = given.get("definition")
            replaced = definition.get("name") if isinstance(definition, Mapping) else None
            if isinstance(replaced, str):
                self._tools.pop(replaced, None)
                self._removed.discard(replaced)
            self._add(f"{where}.tool.definition", len(self._tools), definition)
            return
        if kind != "tool_reference":
            known = "tool_reference or tool_definition" if is_addition else "tool_reference"
            raise InvalidArgument(f"{where}.tool.type", f"{str(kind)[:_MAX_SHOWN]!r} is not {known}")
        name = _string(f"{where}.tool.name", given.get("name"))
        if self.hosted_type(name) is not None:
            return
        if name not in self._tools:
            raise InvalidArgument(f"{where}.tool.name", f"{name[:_MAX_SHOWN]!r} is the name of none of the tools")
        if is_addition:
            self._removed.discard(name)
        else:
            self._removed.add(name)

    def _add(self, where: str, number: int, given: Any) -> None:
        if not isinstance(given, Mapping):
            raise InvalidArgument(where, "must be an object")
        kind = given.get("type") or "custom"
        if not isinstance(kind, str) or kind == "function":
            raise InvalidArgument(f"{where}.type", f"{str(kind)[:_MAX_SHOWN]!r} is no type of a tool, such as 'custom'")
        callers = given.get("allowed_callers")
        is_hosted = kind != "custom" or (isinstance(callers, list) and bool(callers) and "direct" not in callers)
        if is_hosted:
            hosted = str(given.get("name") or kind)
            self._hosted[hosted] = kind
            what = f"{hosted[:_MAX_SHOWN]!a} of type {kind[:_MAX_SHOWN]!a} is ignored"
            why = "only tools with an input_schema that the client runs are supported"
            self.warnings = (*self.warnings, f"{where}: {what}: {why}")[:16]
            return
        _check_fields(where, given, _TOOL_FIELDS)
        _check_cache_control(where, given)
        name = given.get("name")
        if isinstance(name, str) and name in self._tools:
            raise InvalidArgument(f"{where}.name", f"{name[:_MAX_SHOWN]!r} is the name of another tool too")
        if not isinstance(given.get("input_schema"), Mapping):
            raise InvalidArgument(f"{where}.input_schema", "must be a JSON schema, an object")
        names = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "is_strict"}
        values = {ours: given[theirs] for theirs, ours in names.items() if given.get(theirs) is not None}
        try:
            tool = Tool(**{"name": None, **values})
        except InvalidArgument as error:
            rest = error.field.removeprefix("function.").replace("parameters", "input_schema", 1)
            raise InvalidArgument(f"{where}.{rest}", error.problem) from error
        self._tools[tool.name] = (number, tool)


def _tool_choice(given: Mapping[str, Any], tools: _Tools) -> tuple[Any, bool | None]:
    """Return the tool choice of a chat, and whether an answer may have several calls."""
    if not given:
        return None, None
    kind = given.get("type")
    _check_fields("tool_choice", given, _CHOICE_FIELDS - ({"name"} if kind != "tool" else set()))
    is_one = given.get("disable_parallel_tool_use", False)
    if not isinstance(is_one, bool):
        shown = str(is_one)[:_MAX_SHOWN]
        raise InvalidArgument("tool_choice.disable_parallel_tool_use", f"{shown!r} is not true or false")
    is_parallel = False if is_one else None
    if kind == "tool":
        name = _string("tool_choice.name", given.get("name"))
        if (hosted := tools.hosted_type(name)) is not None:
            problem = f"{name[:_MAX_SHOWN]!r} is of type {hosted[:_MAX_SHOWN]!r}, which is not supported"
            raise InvalidArgument("tool_choice.name", problem)
        if name not in {tool.name for _, tool in tools.shown}:
            raise InvalidArgument("tool_choice.name", f"{name[:_MAX_SHOWN]!r} is the name of none of the tools")
        return {"type": "function", "function": {"name": name}}, is_parallel
    if not isinstance(kind, str) or kind not in _TOOL_CHOICES:
        known = ", ".join((*_TOOL_CHOICES, "tool"))
        raise InvalidArgument("tool_choice.type", f"{str(kind)[:_MAX_SHOWN]!r} is not one of {known}")
    if kind == "any" and not tools.shown:
        raise InvalidArgument("tool_choice", "'any' needs tools with an input_schema")
    return _TOOL_CHOICES[kind], is_parallel


def _thinking(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the thinking options and return them; empty if there are none."""
    if not given:
        return given
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _THINKING:
        raise InvalidArgument("thinking.type", f"{str(kind)[:_MAX_SHOWN]!r} is not one of {', '.join(_THINKING)}")
    _check_fields("thinking", given, {"type", *_THINKING[kind]})
    budget = given.get("budget_tokens")
    if kind == "enabled" and (type(budget) is not int or budget < 1):
        problem = "is missing" if budget is None else f"{str(budget)[:_MAX_SHOWN]} is not an integer of 1 or more"
        raise InvalidArgument("thinking.budget_tokens", problem)
    if given.get("display", "summarized") not in _DISPLAYS:
        shown = str(given["display"])[:_MAX_SHOWN]
        raise InvalidArgument("thinking.display", f"{shown!r} is not one of {', '.join(_DISPLAYS)}")
    return given


def _reasoning(thinking: Mapping[str, Any], effort: str | None, *, can_think: bool) -> dict[str, Any] | None:
    """Return the reasoning options of a chat."""
    found: dict[str, Any] = {} if effort is None else {"effort": effort}
    if can_think and thinking.get("type") == "enabled":
        found["thinking_token_budget"] = thinking["budget_tokens"]
    if can_think and thinking.get("type") == "disabled":
        found["include"] = False
    return found or None


def _template_kwargs(thinking: Mapping[str, Any], body: Mapping[str, Any]) -> Any:
    """Return the variables of the chat template: those of the body, and those that switch thinking and keep it."""
    given, edits = body.get("chat_template_kwargs"), object_in(body, "context_management").get("edits")
    listed = edits if isinstance(edits, list) else []
    is_kept = any(_type_in(one) == _CLEAR_THINKING and one.get("keep") == "all" for one in listed)
    is_on = thinking["type"] != "disabled" if thinking else None
    found = thinking_kwargs(is_on=is_on, is_kept=is_kept or None)
    return {**found, **(given or {})} if found and isinstance(given, Mapping | None) else given


def _output_config(body: Mapping[str, Any]) -> Mapping[str, Any]:
    config = dict(object_in(body, "output_config"))
    _check_fields("output_config", config, _OUTPUT_FIELDS)
    _check_effort("output_config.effort", config.get("effort"))
    if "output_format" in body:
        if "format" in config:
            raise InvalidArgument("output_format", "conflicts with output_config.format: give only one of them")
        config["format"] = body["output_format"]
    return config


def _check_effort(where: str, effort: Any) -> None:
    if effort is not None and effort not in _EFFORTS:
        raise InvalidArgument(where, f"{str(effort)[:_MAX_SHOWN]!r} is not one of {', '.join(_EFFORTS)}")


def _response_format(config: Mapping[str, Any]) -> dict[str, Any] | None:
    given = config.get("format")
    if given is None:
        return None
    if not isinstance(given, Mapping) or given.get("type") != "json_schema":
        raise InvalidArgument("output_config.format", "must be an object of type json_schema with a schema")
    _check_fields("output_config.format", given, {"type", "schema"})
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given.get("schema")}}


class _Conversation:
    """The system prompt and the messages of a body, as messages of a chat.

    Attributes:
        messages: messages of a chat; turns of one role are joined.
        tools: the tools in effect at the end.
        effort: the effort that the last system message sets, if any.

    Raises:
        InvalidArgument: names the field, as in `messages[2].content[0].tool_use_id`.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.messages: list[Mapping[str, Any]] = []
        self.tools = _Tools(list_in(body, "tools"))
        self.effort: str | None = None
        given = body.get("messages")
        if not isinstance(given, list) or not given:
            raise InvalidArgument("messages", "must be a list with at least one message")
        if system := _system_text("system", body.get("system", "")):
            self.messages.append({"role": "system", "content": system})
        self._last_user = max((i for i, one in enumerate(given) if _role_in(one) == "user"), default=-1)
        for i, message in enumerate(given):
            self._add(i, f"messages[{i}]", message)
        self.messages = join_turns(self.messages)
        if not self.messages:
            raise InvalidArgument("messages", "have no text")

    @property
    def late_systems(self) -> tuple[int, ...]:
        """Indexes of the system messages after the first message."""
        return tuple(i for i, one in enumerate(self.messages) if i and one["role"] == "system")

    @property
    def continuation(self) -> dict[str, Any]:
        """The chat's options to continue a text of the assistant at the end."""
        last = self.messages[-1]
        if last["role"] != "assistant" or not last["content"] or "tool_calls" in last:
            return {}
        return {"add_generation_prompt": False, "continue_final_message": True}

    def _add(self, number: int, where: str, message: Any) -> None:
        role = _role_in(message)
        if role is None:
            raise InvalidArgument(where, "must be an object of role and content")
        if role not in _OF_ROLE:
            raise InvalidArgument(f"{where}.role", f"{role[:_MAX_SHOWN]!r} is not one of {', '.join(_OF_ROLE)}")
        _check_fields(where, message, _SYSTEM_FIELDS if role == "system" else {"role", "content"})
        if role == "system":
            self._add_system(number, where, message)
        elif role == "user":
            self._add_user(where, message)
        else:
            self._add_assistant(where, message)

    def _add_system(self, number: int, where: str, message: Mapping[str, Any]) -> None:
        content = message.get("content", "")
        for j, block in enumerate(content if isinstance(content, list) else ()):
            if _type_in(block) in ("tool_addition", "tool_removal"):
                _check_block(f"{where}.content[{j}]", block, _OF_ROLE["system"])
                self.tools.change(f"{where}.content[{j}]", block)
        if output := message.get("output_config"):
            if not isinstance(output, Mapping):
                raise InvalidArgument(f"{where}.output_config", "must be an object")
            _check_effort(f"{where}.output_config.effort", output.get("effort"))
            self.effort = output.get("effort") or self.effort
        is_cleared = message.get("clear_at") == "next_user_message" and number < self._last_user
        text = _system_text(f"{where}.content", content, _OF_ROLE["system"])
        if text and not is_cleared:
            self.messages.append({"role": "system", "content": text})

    def _add_user(self, where: str, message: Mapping[str, Any]) -> None:
        texts = []
        for place, block in _blocks(f"{where}.content", message.get("content"), _OF_ROLE["user"]):
            if block["type"] == "tool_result":
                self.messages.append(_tool_message(place, block))
            else:
                texts.append(_content_in(place, block))
        if content := join_contents(texts):
            self.messages.append({"role": "user", "content": content})

    def _add_assistant(self, where: str, message: Mapping[str, Any]) -> None:
        texts, thoughts, calls = [], [], []
        for place, block in _blocks(f"{where}.content", message.get("content"), _OF_ROLE["assistant"]):
            if block["type"] == "text":
                texts.append(_string(f"{place}.text", block.get("text")))
            elif block["type"] == "thinking":
                thoughts.append(_thought(place, block))
            elif block["type"] == "tool_use":
                calls.append(_call(place, block))
        turn: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if thoughts:
            turn["reasoning_content"] = "".join(thoughts)
        if calls:
            turn["tool_calls"] = calls
        self.messages.append(turn)


def _system_text(where: str, content: Any, types: tuple[str, ...] = ("text",)) -> str:
    """Return the text of a system prompt without Claude Code's billing header, which would defeat the prefix cache."""
    if content == "":
        return ""
    texts = []
    for place, block in _blocks(where, content, types):
        if block["type"] == "text":
            text = _string(f"{place}.text", block.get("text"))
            texts.append(text.partition("\n")[2] if text.startswith(_BILLING_HEADER) else text)
    return "".join(texts)


def _blocks(where: str, content: Any, types: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the blocks of a content with their names; a text is one block."""
    if isinstance(content, str):
        yield where, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        raise InvalidArgument(where, "is missing" if content is None else "must be a string or a list of blocks")
    for j, block in enumerate(content):
        _check_block(f"{where}[{j}]", block, types)
        yield f"{where}[{j}]", block


def _check_block(where: str, block: Any, types: tuple[str, ...]) -> None:
    kind = _type_in(block)
    if kind is None:
        raise InvalidArgument(where, "must be an object with a type")
    if kind not in types:
        raise InvalidArgument(f"{where}.type", f"{kind[:_MAX_SHOWN]!r} is not supported: only {', '.join(types)} are")
    _check_fields(where, block, _BLOCK_FIELDS[kind] | _OF_ALL_BLOCKS)
    _check_cache_control(where, block)


def _check_cache_control(where: str, given: Mapping[str, Any]) -> None:
    hint = given.get("cache_control")
    if hint is not None and not (isinstance(hint, Mapping) and hint.get("type") == "ephemeral"):
        raise InvalidArgument(f"{where}.cache_control", "must be an object of type ephemeral")


def _content_in(where: str, block: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    return [read_source_image(where, block)] if block["type"] == "image" else _text_in(where, block)


def _text_in(where: str, block: Mapping[str, Any]) -> str:
    """Return a block as text: a document and a search result with their titles."""
    if block["type"] == "text":
        return _string(f"{where}.text", block.get("text"))
    if block["type"] == "tool_reference":
        return _string(f"{where}.tool_name", block.get("tool_name"))
    if isinstance(cites := block.get("citations"), Mapping) and cites.get("enabled"):
        raise InvalidArgument(f"{where}.citations", "is not supported: answers have no citations")
    if block["type"] == "search_result":
        text = text_of_parts(f"{where}.content", block.get("content"))
        heads = (block.get("title"), block.get("source"))
    else:
        source = block.get("source")
        kind = _type_in(source)
        if not isinstance(source, Mapping) or kind not in ("text", "content"):
            problem = f"{str(kind)[:_MAX_SHOWN]!r} is not supported: only text and content are"
            raise InvalidArgument(f"{where}.source.type", problem)
        name = "data" if kind == "text" else "content"
        text = text_of_parts(f"{where}.source.{name}", source.get(name))
        heads = (block.get("title"), block.get("context"))
    lines = [_string(f"{where}.title", head) for head in heads if head is not None]
    return "\n".join([*lines, text])


def _tool_message(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    given = () if content is None else _blocks(f"{where}.content", content, _RESULT_TYPES)
    result = join_contents([_content_in(place, one) for place, one in given], "\n")
    if block.get("is_error") and not text_in(result).startswith(("Error", "<tool_use_error>")):
        result = join_contents(["Error: ", result])
    return {
        "role": "tool",
        "tool_call_id": _string(f"{where}.tool_use_id", block.get("tool_use_id")),
        "content": result,
    }


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    given = block.get("input", {})
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"{where}.input", "must be an object")
    text = given.get(INVALID_JSON) if given.keys() == {INVALID_JSON} else None
    arguments = text if isinstance(text, str) else json_text.dumps(dict(given), ensure_ascii=False)
    function = {"name": _string(f"{where}.name", block.get("name")), "arguments": arguments}
    return {"id": _string(f"{where}.id", block.get("id")), "type": "function", "function": function}


def _thought(where: str, block: Mapping[str, Any]) -> str:
    """Return the text of a block of thinking; that of an omitted one is in its signature."""
    text = _string(f"{where}.thinking", block.get("thinking"))
    signature = block.get("signature")
    if text or not isinstance(signature, str) or not signature.startswith(_OMITTED):
        return text
    try:
        return base64.b64decode(signature.removeprefix(_OMITTED), validate=True).decode()
    except ValueError as error:
        raise InvalidArgument(f"{where}.signature", "is not one of this server's") from error


def _sign(text: str, *, is_omitted: bool) -> str:
    """Return the signature of a thought: a digest, or the thought itself if its text is omitted."""
    if is_omitted:
        return _OMITTED + base64.b64encode(text.encode()).decode()
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _role_in(message: Any) -> str | None:
    role = message.get("role") if isinstance(message, Mapping) else None
    return role if isinstance(role, str) else None


def _type_in(block: Any) -> str | None:
    kind = block.get("type") if isinstance(block, Mapping) else None
    return kind if isinstance(kind, str) else None


def _string(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(where, "is missing" if value is None else f"{str(value)[:_MAX_SHOWN]!r} is not a string")
    return value


def _check_fields(where: str, given: Mapping[str, Any], known: frozenset[str] | set[str]) -> None:
    for name, value in given.items():
        if value is not None and name not in known:
            raise InvalidArgument(
                f"{where}.{name[:_MAX_SHOWN]}", f"is not supported: must be one of {', '.join(sorted(known))}"
            )


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """Format of the answers to one body.

    Attributes:
        heading: id and model of the answer.
        block_size: tokens of a block of the prefix cache; 0 if prefixes are not cached.
    """

    heading: ResponseMetadata
    request: MessagesRequest
    block_size: int = 0

    def message(self, content: Sequence[Mapping[str, Any]], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message that has not ended."""
        message: dict[str, Any] = {
            "id": f"msg_{self.heading.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.heading.model,
            "content": list(content),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return message | self.edits()

    def edits(self) -> dict[str, Any]:
        """Return the field of edits, of which there is none, if the body has the options of edits."""
        return {"context_management": {"applied_edits": []}} if self.request.reports_edits else {}

    def usage(self, usage: Usage, num_thinking_tokens: int | None = None) -> dict[str, Any]:
        """Return the usage: the three counts of input tokens add up to the prompt.

        Tokens that were added to the cache are those of the prompt's complete blocks.
        """
        read = min(usage.cached_tokens, usage.prompt_tokens)
        complete = usage.prompt_tokens // self.block_size * self.block_size if self.block_size else 0
        created = max(0, complete - read)
        found: dict[str, Any] = {
            "input_tokens": usage.prompt_tokens - read - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": read,
            "output_tokens": 0 if self.request.max_tokens == 0 else usage.completion_tokens,
        }
        if num_thinking_tokens is not None:
            found["output_tokens_details"] = {"thinking_tokens": num_thinking_tokens}
        return found

    def stop(self, reason: str, matched_stop: str | int | None, num_tokens: int) -> dict[str, Any]:
        """Return the reason of the end, and the stop sequence if one was matched."""
        stop_reason, sequence = "end_turn", None
        if reason == FinishReason.TOOL_CALLS.value:
            stop_reason = "tool_use"
        elif reason == FinishReason.STOP.value and isinstance(matched_stop, str):
            stop_reason, sequence = "stop_sequence", matched_stop
        elif reason != FinishReason.STOP.value:
            is_full = reason == FinishReason.LENGTH.value and num_tokens < (self.request.max_tokens or 0)
            stop_reason = "model_context_window_exceeded" if is_full else "max_tokens"
        return {"stop_reason": stop_reason, "stop_sequence": sequence}

    def thinking_block(self, text: str) -> dict[str, Any]:
        """Return a thought as a block."""
        is_omitted = self.request.omits_thinking
        signature = _sign(text, is_omitted=is_omitted)
        return {"type": "thinking", "thinking": "" if is_omitted else text, "signature": signature}


def tool_use_block(call: ToolCall) -> dict[str, Any]:
    """Return a call as a block."""
    try:
        given = json_object("input", call.arguments or "{}", max_bytes=_MAX_INPUT_BYTES)
    except InvalidArgument:
        given = {INVALID_JSON: call.arguments}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def build_message_answer(how: MessageFormat, output: RequestOutput, num_thinking_tokens: int) -> dict[str, Any]:
    """Return the response of a finished request."""
    (one,) = output.outputs
    if how.request.max_tokens == 0:
        return how.message((), how.usage(output.usage, 0)) | {"stop_reason": "max_tokens"}
    usage = how.usage(output.usage, num_thinking_tokens)
    content: list[dict[str, Any]] = [how.thinking_block(one.reasoning_content)] if one.reasoning_content else []
    if one.text or not (content or one.tool_calls):
        content.append({"type": "text", "text": one.text})
    content += [tool_use_block(call) for call in one.tool_calls]
    stop = how.stop(one.finish_reason or "", one.matched_stop, output.usage.completion_tokens)
    return how.message(content, usage) | stop


def event_bytes(value: Mapping[str, Any]) -> bytes:
    """Encode an event of a stream, whose `type` is its name."""
    kind: str = value["type"]
    return b"".join((b"event: ", kind.encode(), b"\ndata: ", *json_text.pieces(value), b"\n\n"))


PING = event_bytes({"type": "ping"})
_TEXT, _THOUGHT, _TOOL_USE = "text", "thinking", "tool_use"
_DELTAS = {_TEXT: ("text_delta", "text"), _THOUGHT: ("thinking_delta", "thinking")}
_ARGUMENTS = ("input_json_delta", "partial_json")
_MARK = "jpaged-mark"


@dataclass(slots=True)
class MessageEvents:
    """Builds the events of one message from its request's events. Must not be shared between threads.

    Attributes:
        thinking: the thinking so far.
    """

    how: MessageFormat
    thinking: str = ""
    _usage: Usage = field(default_factory=Usage)
    _index: int = -1
    _kind: str = ""
    _call_index: int = -1
    _around: tuple[bytes, bytes] = (b"", b"")
    _stop: Mapping[str, Any] = field(default_factory=dict)

    def of(self, event: OutputEvent) -> bytes:
        """Return the events for an event of the request."""
        return b"".join(self._iter_events(event))

    def end(self, num_thinking_tokens: int) -> bytes:
        """Return the last events."""
        usage = self.how.usage(self._usage, num_thinking_tokens)
        delta = {"type": "message_delta", "delta": self._stop, "usage": usage, **self.how.edits()}
        return event_bytes(delta) + event_bytes({"type": "message_stop"})

    def _iter_events(self, event: OutputEvent) -> Iterator[bytes]:
        if self._usage.prompt_tokens == 0:
            start = self.how.usage(replace(event.usage, completion_tokens=0))
            yield event_bytes({"type": "message_start", "message": self.how.message((), start)})
        self._usage = event.usage
        is_empty = self.how.request.max_tokens == 0
        if event.reasoning_content and not is_empty:
            self.thinking += event.reasoning_content
            yield from self._open(_THOUGHT, {"type": _THOUGHT, "thinking": "", "signature": ""})
            if not self.how.request.omits_thinking:
                yield self._delta(event.reasoning_content)
        if event.text and not is_empty:
            yield from self._open(_TEXT, {"type": _TEXT, "text": ""})
            yield self._delta(event.text)
        for piece in () if is_empty else event.tool_calls:
            yield from self._call(piece)
        if event.finish is not None:
            if self._index < 0 and not is_empty:
                yield from self._open(_TEXT, {"type": _TEXT, "text": ""})
            yield from self._close()
            finish, num_tokens = event.finish, event.usage.completion_tokens
            reason = FinishReason.LENGTH if is_empty else finish.reason
            self._stop = self.how.stop(reason.value, finish.matched_stop, num_tokens)

    def _call(self, piece: ToolCallPiece) -> Iterator[bytes]:
        if self._kind != _TOOL_USE or piece.index != self._call_index:
            yield from self._close()
            self._call_index = piece.index
            block = {"type": _TOOL_USE, "id": piece.id or "", "name": piece.name or "", "input": {}}
            yield from self._open(_TOOL_USE, block)
        if piece.arguments:
            yield self._delta(piece.arguments)

    def _open(self, kind: str, block: Mapping[str, Any]) -> Iterator[bytes]:
        """Begin a block unless one of this kind is open; end the previous one."""
        if self._kind == kind:
            return
        yield from self._close()
        self._kind, self._index = kind, self._index + 1
        name, text = _DELTAS.get(kind, _ARGUMENTS)
        before, _, after = self._of_delta({"type": name, text: _MARK}).partition(json_text.quoted(_MARK))
        self._around = before, after
        yield event_bytes({"type": "content_block_start", "index": self._index, "content_block": block})
        if self._index == 0:
            yield PING

    def _delta(self, text: str) -> bytes:
        before, after = self._around
        return b"".join((before, json_text.quoted(text), after))

    def _close(self) -> Iterator[bytes]:
        if not self._kind:
            return
        if self._kind == _THOUGHT:
            signature = self.how.thinking_block(self.thinking)["signature"]
            yield self._of_delta({"type": "signature_delta", "signature": signature})
        yield event_bytes({"type": "content_block_stop", "index": self._index})
        self._kind = ""

    def _of_delta(self, delta: Mapping[str, Any]) -> bytes:
        return event_bytes({"type": "content_block_delta", "index": self._index, "delta": delta})
