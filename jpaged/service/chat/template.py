"""A model's chat template: messages and tools in, text out, within limits of time, memory and size."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jpaged.chat import ChatOptions, ReasoningOptions, Tool
from jpaged.errors import InvalidArgument, RequestTooLong, Unsupported
from jpaged.service.chat.frames import Kind
from jpaged.service.chat.messages import forms, with_built_in_tools
from jpaged.service.chat.parsers.formats import has_built_in_tools
from jpaged.service.chat.process import CPU_S, OutOfTimeError, TemplateProcess

_FIELD = "chat.messages"
_KWARGS = "chat_template_kwargs"
_TRIAL = ({"role": "user", "content": "Hello"},)
_TRIAL_TOOLS = (Tool("now", "Return the time.").as_json(),)
_KNOWN_ROLES = ("user", "assistant")
"""Roles whose messages are not searched for in the rendered text: templates may legitimately drop earlier turns."""
_WARNED_ROLES = ("system", "tool", "developer")
_LONG_CHARS = 32
"""A text of at least this length occurs in another message or in the template only if it was copied."""
_MARK = "jpagedmark7f3a"
_TRIAL_BYTES = 1 << 20
_OURS = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"),
        *("conversations", "chat_template", "return_assistant_tokens_mask", "continue_final_message"),
    }
)
"""Names that callers may not set: parameters of transformers' renderer, and variables that it passes to a template."""
_MAX_SHOWN = 80
_Outcome = Callable[[Sequence[Mapping[str, Any]]], tuple[Kind, str]]
_LOG = logging.getLogger(__name__)
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_EFFORT = "reasoning_effort"
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

    Attributes:
        source: its text.
        uses_tools: the template reads the tools that a caller sends.

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
    ) -> None:
        self._process = process
        self._variables = variables
        self._name = name
        self.source = source
        try:
            tools = _TRIAL_TOOLS if is_for_tools else None
            kind, text = process.render(source, variables, _TRIAL, _TRIAL_BYTES, tools=tools)
            if kind in (Kind.RENDERED, Kind.RAISED):
                kind, text = process.names(source)
        except OutOfTimeError:
            kind, text = Kind.OVER, f"{CPU_S} s of processor time"
        if kind is not Kind.NAMES:
            what = {Kind.OVER: "exceeds its limit", Kind.LONG: "produces too many bytes"}.get(kind, "fails")
            whose = "its chat template" if field == "model" else "the template"
            raise InvalidArgument(field, f"{whose} {what} for one plain user message: {text}")
        names = frozenset(json.loads(text))
        self.uses_tools = "tools" in names
        self._uses_documents = "documents" in names
        self._warned: set[str] = set()
        self._settable = names - _OURS - variables.keys()

    def reasoning_variables(self, reasoning: ReasoningOptions, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the template variables that implement the requested reasoning options.

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

        def outcome(form: Sequence[Mapping[str, Any]]) -> tuple[Kind, str]:
            shown = () if is_built_in else tools
            return self._outcome(form, {**self._variables, **kwargs}, max_bytes, shown, layout)

        if is_built_in:
            text, form = _text_with_built_in_tools(in_known_roles, max_bytes, tools, outcome)
        else:
            text, form = _text_of_forms(in_known_roles, max_bytes, outcome)
        self._check_roles(form, text, outcome)
        return text

    def _check_roles(self, messages: Sequence[Mapping[str, Any]], text: str, outcome: _Outcome) -> None:
        """Reject messages of an unknown role that the template drops; warn once if it drops system or tool messages."""
        marks: dict[int, str] = {}
        for i, message in enumerate(messages):
            role, content = message["role"], str(message.get("content") or "").strip()
            if role in _KNOWN_ROLES or role in self._warned or not content:
                continue
            if content not in text or not (role in _WARNED_ROLES or len(content) >= _LONG_CHARS):
                marks[i] = f"{_MARK}{i}x"
        if not marks:
            return
        kind, probed = outcome([{**one, "content": marks.get(i, one.get("content"))} for i, one in enumerate(messages)])
        if kind is not Kind.RENDERED:
            return
        for i in (i for i, mark in marks.items() if mark not in probed):
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
    ) -> tuple[Kind, str]:
        try:
            tools = list(tools)
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
    is_dropped = kind is Kind.RENDERED and tools and "</tools>" not in text
    if kind in (Kind.RAISED, Kind.FAILED) or is_dropped:
        form = with_built_in_tools(messages, tools, is_system=False)
        kind, text = outcome(form)
    if kind is Kind.FAILED:
        raise InvalidArgument(_FIELD, f"the chat template fails on them: {text}")
    return _text_of(kind, text, max_bytes), form


def _has_call(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls")) or message.get("role") == "tool"


def _text_of_forms(
    messages: Sequence[Mapping[str, Any]], max_bytes: int, outcome: _Outcome
) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """Return the text of the first form that the template accepts, and the form.

    If a template prints None for a call's missing content, use "" instead.
    """
    failure, found = None, None
    has_null = any(message.get("tool_calls") and message.get("content") is None for message in messages)
    for form in forms(messages):
        kind, text = outcome(form)
        if kind is Kind.RENDERED and found is not None:
            return (text, form) if text.count("None") < found[0].count("None") else found
        if kind is Kind.RENDERED and has_null and "None" in text:
            found = (text, form)
        elif kind is not Kind.FAILED and found is None:
            return _text_of(kind, text, max_bytes), form
        else:
            failure = failure or InvalidArgument(_FIELD, f"the chat template fails on them: {text}")
    if found is not None:
        return found
    assert failure is not None
    raise failure


def _text_of(kind: Kind, text: str, max_bytes: int) -> str:
    if kind is Kind.RAISED:
        raise InvalidArgument(_FIELD, text)
    if kind is Kind.LONG:
        raise RequestTooLong(_FIELD, f"the chat template produces {text} bytes, over the limit of {max_bytes}")
    if kind is Kind.OVER:
        raise InvalidArgument(_FIELD, f"the chat template needs more than {text}")
    return text
