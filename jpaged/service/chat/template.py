"""A conversation, and the chat template that renders it: messages and tools in, text out.

A template runs within limits of time, memory and size. A conversation is checked, and comes as a caller sends it:

    {"role": "assistant", "content": ..., "reasoning_content": ..., "tool_calls": [
        {"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}]}
    {"role": "tool", "tool_call_id": ..., "content": ...}

Templates differ in how they expect a turn with calls and no content. Most expect arguments as an object and a content
of None; DeepSeek's adds arguments to text; gpt-oss's looks for tags in the content. `forms` yields all variants.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from jpaged import json_text
from jpaged.chat import MAX_CALL_ID_CHARS, ChatOptions, ReasoningOptions, Tool, json_object, read_message
from jpaged.errors import InvalidArgument, RequestTooLong, Unsupported
from jpaged.service.chat.formats import has_built_in_tools
from jpaged.service.chat.sandbox import CPU_S, FrameKind, OutOfTimeError, TemplateProcess
from jpaged.types import text_bytes

_FIELD = "chat.messages"
_ROLE_OF = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}
"""Keys that only messages of one role may have."""
_SHORT = ("name", "tool_call_id")


@runtime_checkable
class ToolAwareTokenizer(Protocol):
    """A tokenizer whose chat template may take tools and variables."""

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, *, max_bytes: int) -> list[int]:
        """Return the token ids of a conversation, as `Tokenizer.apply_chat_template`.

        Raises:
            Unsupported: also if the template ignores tools.
        """
        ...


@runtime_checkable
class CachingTokenizer(Protocol):
    """A tokenizer that keeps the ids of conversations, so that a later turn costs only what it adds."""

    def cached_chat_ids(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, *, max_bytes: int, tenant: str, salt: str
    ) -> Sequence[int]:
        """Return and raise what `ToolAwareTokenizer.chat_ids` does.

        Args:
            tenant, salt: scope of the cache: only requests with the same two share entries.
        """
        ...


def read_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return each message as `read_message` parses it.

    Raises:
        InvalidArgument: names the field, as in `chat.messages[1].tool_calls[0].id`.
    """
    return [read_message(f"{_FIELD}[{i}]", message) for i, message in enumerate(messages)]


def messages_bytes(messages: Sequence[Mapping[str, Any]]) -> int:
    """Check the texts of parsed messages and return their total size in bytes.

    Raises:
        InvalidArgument: names the invalid field, as in `chat.messages[1].tool_calls[0].id`.
    """
    return sum(_message_bytes(f"{_FIELD}[{i}]", message) for i, message in enumerate(messages))


def _message_bytes(where: str, message: Mapping[str, Any]) -> int:
    num_bytes = 0
    for key, value in message.items():
        if message["role"] != _ROLE_OF.get(key, message["role"]):
            raise InvalidArgument(f"{where}.{key}", f"is only allowed in messages of the role {_ROLE_OF[key]!r}")
        if type(value) is str and value.isascii() and key not in _SHORT:
            num_bytes += len(value)
        elif type(value) is list and key == "content":
            num_bytes += sum(text_bytes(f"{where}.content", part.get("text", "")) for part in value)
        elif key == "tool_calls":
            num_bytes += sum(_call_bytes(f"{where}.tool_calls[{j}]", call) for j, call in enumerate(value))
        elif value is not None:
            num_bytes += (_short if key in _SHORT else text_bytes)(f"{where}.{key}", value)
    return num_bytes


def _short(where: str, text: str) -> int:
    if len(text) > MAX_CALL_ID_CHARS:
        raise InvalidArgument(where, f"has {len(text)} characters; at most {MAX_CALL_ID_CHARS}")
    return text_bytes(where, text)


def _call_bytes(where: str, call: Mapping[str, Any]) -> int:
    num_bytes = _short(f"{where}.id", call["id"]) if "id" in call else 0
    return num_bytes + sum(text_bytes(f"{where}.function.{key}", text) for key, text in call["function"].items())


def for_template(messages: Sequence[Mapping[str, Any]], *, max_bytes: int) -> list[dict[str, Any]]:
    """Return parsed messages in the first of the `forms`: arguments are objects, or texts if they hold no object."""
    return [_plain(message, max_bytes) for message in messages]


def _plain(message: Mapping[str, Any], max_bytes: int) -> dict[str, Any]:
    if type(message["content"]) is list:
        plain = [{"type": "image"} if part["type"] == "image" else part for part in message["content"]]
        message = {**message, "content": plain}
    if not message.get("tool_calls"):
        return dict(message)
    return {**message, "tool_calls": [_plain_call(call, max_bytes) for call in message["tool_calls"]]}


def _plain_call(call: Mapping[str, Any], max_bytes: int) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _arguments(function["arguments"] or "{}", max_bytes)}}


def _arguments(text: str, max_bytes: int) -> Any:
    """Return the object that the arguments encode, or the text itself if they encode none that a template can print."""
    try:
        return json_object("arguments", text, max_bytes=max_bytes)
    except InvalidArgument:
        return text


_TOOLS_HEAD = """You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_TOOLS_TAIL = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
"""The prompt of Hermes and Qwen, whose calls `HermesParser` reads."""


def with_built_in_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, is_system: bool = True
) -> list[Mapping[str, Any]]:
    """Return a conversation with tools, calls and results written as text, for templates without tool support.

    Args:
        messages: as `for_template` returns them.
        tools: as `Tool.as_json` returns them; if empty, rewrite only calls and results.
        is_system: describe the tools in the system message; otherwise in the first user message.
    """
    plain = [_with_text_calls(message) for message in messages]
    if not tools:
        return plain
    lines = "\n".join(json_text.dumps(tool, ensure_ascii=False) for tool in tools)
    prompt, role = f"{_TOOLS_HEAD}{lines}{_TOOLS_TAIL}", "system" if is_system else "user"
    place = next((i for i, message in enumerate(plain) if message.get("role") == role), None)
    if place is None or (is_system and place > 0):
        return [{"role": role, "content": prompt}, *plain]
    content = plain[place].get("content") or ""
    if isinstance(content, list):
        parts = [*content, _text(f"\n\n{prompt}")] if is_system else [_text(f"{prompt}\n\n"), *content]
        plain[place] = {**plain[place], "content": parts}
        return plain
    texts = (content, prompt) if is_system else (prompt, content)
    plain[place] = {**plain[place], "content": "\n\n".join(text for text in texts if text)}
    return plain


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _with_text_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message.get("role") == "tool" and isinstance(message.get("content"), list):
        head, tail = _text("<tool_response>\n"), _text("\n</tool_response>")
        return {"role": "user", "content": [head, *message["content"], tail]}
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = {name: call["function"][name] for name in ("name", "arguments")}
        calls.append(f"<tool_call>\n{json_text.dumps(function, ensure_ascii=False)}\n</tool_call>")
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": "\n".join([*filter(None, [message.get("content")]), *calls])}


def forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield a conversation in the forms that templates accept, the most common first; only one if it has no calls.

    The last form is for templates that accept only objects: a text that encodes none becomes an object's one value.
    """
    yield list(messages)
    if not any(message.get("tool_calls") for message in messages):
        return
    for reads, empty in (
        (_same, ""),
        (_same, None),
        (_as_text, None),
        (_as_text, ""),
        (_as_object, None),
        (_as_object, ""),
    ):
        yield [_form(message, reads, empty) for message in messages]


def _form(message: Mapping[str, Any], reads: Callable[[Any], Any], empty: str | None) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": reads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": message.get("content") or empty, "tool_calls": calls}


def _same(arguments: Any) -> Any:
    return arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json_text.dumps(arguments, ensure_ascii=False)


def _as_object(arguments: Any) -> Any:
    return {"arguments": arguments} if isinstance(arguments, str) else arguments


_KWARGS = "chat_template_kwargs"
_TRIAL_TEXT = "Hello"
_TRIAL = ({"role": "user", "content": _TRIAL_TEXT},)
_TRIAL_TOOLS = (Tool("now", "Return the time.").as_json(),)
_KNOWN_ROLES = ("user", "assistant")
"""Roles whose messages are not searched for in the rendered text: templates may legitimately drop earlier turns."""
_WARNED_ROLES = ("system", "tool", "developer")
"""Roles whose omission is only logged, once. A role that was printed once is not searched for again."""
_LONG_CHARS = 32
"""A text of at least this length occurs in another message or in the template only if it was copied."""
_MARK = "jpagedmark7f3a"
_TRIAL_BYTES = 1 << 20
_TRIAL_CALL = {"id": "call00001", "type": "function", "function": {"name": "now", "arguments": {}}}
_TRIAL_RESULT = {"role": "tool", "tool_call_id": _TRIAL_CALL["id"], "content": _TRIAL_TEXT}
_NULL = "None"
"""What a template prints for a missing content that it does not check."""
_OURS = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"),
        *("conversations", "chat_template", "return_assistant_tokens_mask", "continue_final_message"),
    }
)
"""Names that callers may not set: parameters of transformers' renderer, and variables that it passes to a template."""
_MAX_SHOWN = 80
_Outcome = Callable[[Sequence[Mapping[str, Any]]], tuple[FrameKind, str]]
_LOG = logging.getLogger(__name__)
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_EFFORT = "reasoning_effort"
_NO_EFFORT = "none"
_DEVELOPER = "developer"
"""OpenAI's newer name of the system role; templates print unknown roles verbatim."""
_SWITCHES = ("enable_thinking", "thinking")
"""The variables that switch thinking on or off: Qwen's and DeepSeek's."""


class ChatTemplate:
    """A chat template that passed a trial. Thread-safe.

    Args:
        variables: variables passed to the template in addition to the messages: the special tokens.
        name: name of the template's owner, for errors.
        field: the field that errors of a broken template name.
        is_for_tools: the template is used only with tools, and is tried with one.
        content_format: `string` or `openai`: a content is a text, or a list with a part of the type text. auto is
            string unless the template prints a text only as a part.

    Attributes:
        source: its text.
        uses_tools: the template reads the tools that a caller sends.
        content_format: the resolved one.

    Raises:
        InvalidArgument: it fails on a plain user message. A refusal by `raise_exception` is not a failure.
    """

    def __init__(
        self,
        process: TemplateProcess,
        source: str,
        variables: Mapping[str, Any],
        *,
        name: str = "this model",
        field: str = "model",
        is_for_tools: bool = False,
        content_format: str = "auto",
    ) -> None:
        self._process = process
        self._variables = variables
        self._name = name
        self.source = source
        self.content_format = "openai" if content_format == "openai" else "string"
        try:
            tools = _TRIAL_TOOLS if is_for_tools else None

            def trial() -> tuple[FrameKind, str]:
                return process.render(source, variables, self._in_format(_TRIAL), _TRIAL_BYTES, tools=tools)

            kind, text = trial()
            is_missing = kind is FrameKind.FAILED or (kind is FrameKind.RENDERED and _TRIAL_TEXT not in text)
            if content_format == "auto" and is_missing:
                self.content_format = "openai"
                as_parts = trial()
                if as_parts[0] is FrameKind.RENDERED and _TRIAL_TEXT in as_parts[1]:
                    kind, text = as_parts
                else:
                    self.content_format = "string"
            if kind in (FrameKind.RENDERED, FrameKind.RAISED):
                kind, text = process.names(source)
        except OutOfTimeError:
            kind, text = FrameKind.OVER, f"{CPU_S} s of processor time"
        if kind is not FrameKind.NAMES:
            what = {FrameKind.OVER: "exceeds its limit", FrameKind.LONG: "produces too many bytes"}.get(kind, "fails")
            whose = "its chat template" if field == "model" else "the template"
            raise InvalidArgument(field, f"{whose} {what} for one plain user message: {text}")
        names = frozenset(json.loads(text))
        self.uses_tools = "tools" in names
        self._uses_documents = "documents" in names
        self._warned: set[str] = set()
        self._printed: set[str] = set()
        self._prints_null: bool | None = None
        self._settable = names - _OURS - variables.keys()

    def check_defaults(self, kwargs: Mapping[str, Any]) -> None:
        """Raise InvalidArgument if the server's defaults set a variable that callers may not set."""
        for name in kwargs.keys() & (_OURS | self._variables.keys()):
            known = ", ".join(sorted(self._settable)) or "none"
            field = f"default_{_KWARGS}.{name}"
            raise InvalidArgument(field, f"cannot be set; the variables of the chat template are {known}")

    def _in_format(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return messages with their texts as the template takes them."""
        if self.content_format == "string":
            return messages
        return [
            {**one, "content": [{"type": "text", "text": one["content"]}]}
            if isinstance(one.get("content"), str)
            else one
            for one in messages
        ]

    def reasoning_variables(self, reasoning: ReasoningOptions, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the template variables that implement the requested reasoning options.

        As in vLLM, an effort also sets `enable_thinking`, false for "none", unless the caller sets it.

        Args:
            kwargs: variables that the caller sets by name.

        Raises:
            InvalidArgument: the template has no variable that enables thinking, or the caller also sets it by name.
        """
        asked = {"effort": (reasoning.effort, (_EFFORT,)), "enabled": (reasoning.enabled, _SWITCHES)}
        variables: dict[str, Any] = {}
        for field, (value, names) in asked.items():
            if value is None:
                continue
            name = next((name for name in names if name in self._settable), None)
            if name is None and field == "effort":
                continue  # advice: clients of OpenAI's API send it by default
            if name is None:
                raise InvalidArgument(f"reasoning.{field}", f"the chat template has no variable {' or '.join(names)}")
            if name in kwargs:
                raise InvalidArgument(f"reasoning.{field}", f"conflicts with {_KWARGS}.{name}: give only one of them")
            variables[name] = value
        switch = _SWITCHES[0]
        if reasoning.effort is not None and switch in self._settable and switch not in kwargs:
            variables.setdefault(switch, reasoning.effort != _NO_EFFORT)
        return variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_bytes: int,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] = _NOTHING,
        documents: Sequence[Mapping[str, Any]] = (),
        options: ChatOptions | None = None,
    ) -> str:
        """Return the rendered conversation, up to the assistant's turn unless `options` choose another end.

        Args:
            tools: as `Tool.as_json` returns them.
            kwargs: variables of the template; unused ones have no effect.
            documents: for a template that uses them.

        Raises:
            InvalidArgument: the template refuses the messages, fails on them or leaves one out, or the caller may not
                set a variable.
            RequestTooLong: the text exceeds max_bytes.
            Unsupported: there are tools or documents that the template does not use.
            Unavailable: the process that renders has ended.
        """
        if tools and not self.uses_tools and not has_built_in_tools(self.source):
            raise Unsupported(f"tools: the chat template of {self._name} does not support tools")
        if documents and not self._uses_documents:
            raise Unsupported(f"documents: the chat template of {self._name} does not support documents")
        for name in kwargs.keys() & (_OURS | self._variables.keys()):
            known = ", ".join(sorted(self._settable)) or "none"
            raise InvalidArgument(f"{_KWARGS}.{name}", f"cannot be set; the variables of the chat template are {known}")
        asked = options or ChatOptions()
        layout = {
            "add_generation_prompt": asked.add_generation_prompt,
            "continue_final_message": asked.continue_final_message,
            "documents": list(documents) or None,
        }
        in_known_roles = self._in_known_roles(messages)
        has_calls = "tool_calls" not in self.source and any(map(_has_call, in_known_roles))
        is_built_in = has_built_in_tools(self.source) and (bool(tools) or has_calls)

        def outcome(form: Sequence[Mapping[str, Any]]) -> tuple[FrameKind, str]:
            shown = () if is_built_in else tools
            return self._outcome(form, {**self._variables, **kwargs}, max_bytes, shown, layout)

        if is_built_in:
            text, form = _text_with_built_in_tools(in_known_roles, max_bytes, tools, outcome)
        else:

            def may_print_null(text: str) -> bool:
                others = json_text.encode([in_known_roles, list(tools), dict(kwargs), list(documents)])
                return text.count(_NULL) > others.count(_NULL.encode()) or self._is_null_printed()

            text, form = _text_of_forms(in_known_roles, max_bytes, outcome, may_print_null)
        self._check_roles(form, text, outcome)
        return text

    def _is_null_printed(self) -> bool:
        """Return True if a trial shows, or cannot exclude, that the template prints a missing content as None.

        The trial depends only on the template, so that a conversation has the same text on every server.
        """
        if self._prints_null is None:
            self._prints_null = self._try_nulls()
        return self._prints_null

    def _try_nulls(self) -> bool:
        (user,), answer = _TRIAL, {"role": "assistant", "content": _TRIAL_TEXT}
        call = {"role": "assistant", "content": None, "tool_calls": [_TRIAL_CALL]}
        turns: list[list[Mapping[str, Any]]] = [
            [call, _TRIAL_RESULT],
            [{**call, "reasoning_content": _TRIAL_TEXT}, _TRIAL_RESULT],
        ]
        longer = ([user, *turn, *end] for end in ([], [answer, user]) for turn in turns)
        trials: list[list[Mapping[str, Any]]] = [[user, call], *longer]
        has_text = False
        for trial in trials:
            counts = []
            for empty in (None, ""):
                form = [_form(message, _same, empty) for message in trial]
                try:
                    kind, text = self._outcome(form, self._variables, _TRIAL_BYTES, _TRIAL_TOOLS, _NOTHING)
                except InvalidArgument:
                    return True
                if kind is FrameKind.RENDERED:
                    counts.append(text.count(_NULL))
            if len(counts) == 2 and counts[0] > counts[1]:
                return True
            has_text = has_text or len(counts) == 2
        return not has_text

    def _check_roles(self, messages: Sequence[Mapping[str, Any]], text: str, outcome: _Outcome) -> None:
        """Reject messages of an unknown role that the template drops; warn once if it drops system or tool messages."""
        marks, place = dict[int, str](), 0
        for i, message in enumerate(messages):
            role = message["role"]
            if role in _KNOWN_ROLES or role in self._warned or role in self._printed:
                continue
            content = message.get("content") or ""
            content = content.strip() if isinstance(content, str) else ""
            may_be_copied = role in _WARNED_ROLES or len(content) >= _LONG_CHARS
            found = text.find(content, place) if may_be_copied else -1  # most templates keep the order of messages
            place = max(place, found)
            if content and found < 0 and not (may_be_copied and content in text):
                marks[i] = f"{_MARK}{i}x"
        if not marks:
            return
        kind, probed = outcome([{**one, "content": marks.get(i, one.get("content"))} for i, one in enumerate(messages)])
        if kind is not FrameKind.RENDERED:
            return
        omitted = [i for i, mark in marks.items() if mark not in probed]
        probed_roles, omitted_roles = ({messages[i]["role"] for i in each} for each in (marks, omitted))
        self._printed |= (probed_roles & {*_WARNED_ROLES}) - omitted_roles
        for i in omitted:
            role = messages[i]["role"]
            if role not in _WARNED_ROLES:
                raise InvalidArgument(
                    f"{_FIELD}[{i}].role",
                    f"{role[:_MAX_SHOWN]!r} is not a role of the chat template, which omits the message",
                )
            if role not in self._warned:
                self._warned.add(role)
                _LOG.warning("the chat template of %s omits messages of the role %r", self._name, role)

    def _in_known_roles(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return the messages with "developer" replaced by "system" if the template does not know the role."""
        if _DEVELOPER in self.source:
            return messages
        return [{**one, "role": "system"} if one.get("role") == _DEVELOPER else one for one in messages]

    def _outcome(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        max_bytes: int,
        tools: Sequence[Mapping[str, Any]],
        layout: Mapping[str, Any],
    ) -> tuple[FrameKind, str]:
        try:
            tools, messages = list(tools), self._in_format(messages)
            return self._process.render(self.source, variables, messages, max_bytes, tools=tools or None, layout=layout)
        except OutOfTimeError as error:
            raise InvalidArgument(_FIELD, f"the chat template needs more than {CPU_S} s of processor time") from error
        except (TypeError, ValueError) as error:
            raise InvalidArgument(_FIELD, f"contain something other than text: {error}") from error


def _text_with_built_in_tools(
    messages: Sequence[Mapping[str, Any]], max_bytes: int, tools: Sequence[Mapping[str, Any]], outcome: _Outcome
) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """Return the conversation with tools as text, and its form: tools in the system message, or in the user's."""
    form = with_built_in_tools(messages, tools)
    kind, text = outcome(form)
    is_dropped = kind is FrameKind.RENDERED and tools and "</tools>" not in text
    if kind in (FrameKind.RAISED, FrameKind.FAILED) or is_dropped:
        form = with_built_in_tools(messages, tools, is_system=False)
        kind, text = outcome(form)
    if kind is FrameKind.FAILED:
        raise InvalidArgument(_FIELD, f"the chat template fails on them: {text}")
    return _read_text(kind, text, max_bytes), form


def _has_call(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls")) or message.get("role") == "tool"


def _text_of_forms(
    messages: Sequence[Mapping[str, Any]], max_bytes: int, outcome: _Outcome, may_print_null: Callable[[str], bool]
) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """Return the text of the first form that the template accepts, and the form.

    If a template prints None for a call's missing content, use "" instead.

    Args:
        may_print_null: return False if no None of a text stands for a missing content.
    """
    failure, found = None, None
    has_null = any(message.get("tool_calls") and message.get("content") is None for message in messages)
    for form in forms(messages):
        kind, text = outcome(form)
        if kind is FrameKind.RENDERED and found is not None:
            return (text, form) if text.count(_NULL) < found[0].count(_NULL) else found
        if kind is FrameKind.RENDERED and has_null and _NULL in text and may_print_null(text):
            found = (text, form)
        elif kind is not FrameKind.FAILED and found is None:
            return _read_text(kind, text, max_bytes), form
        else:
            failure = failure or InvalidArgument(_FIELD, f"the chat template fails on them: {text}")
    if found is not None:
        return found
    assert failure is not None
    raise failure


def _read_text(kind: FrameKind, text: str, max_bytes: int) -> str:
    if kind is FrameKind.RAISED:
        raise InvalidArgument(_FIELD, text)
    if kind is FrameKind.LONG:
        raise RequestTooLong(_FIELD, f"the chat template produces {text} bytes, over the limit of {max_bytes}")
    if kind is FrameKind.OVER:
        raise InvalidArgument(_FIELD, f"the chat template needs more than {text}")
    return text
