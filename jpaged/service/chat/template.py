"""A model's chat template: messages and tools in, text out, within limits of time, memory and size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jpaged.chat import ReasoningOptions
from jpaged.errors import InvalidArgument, RequestTooLong, Unsupported
from jpaged.service.chat.frames import Kind
from jpaged.service.chat.messages import forms, with_built_in_tools
from jpaged.service.chat.parsers.formats import has_built_in_tools
from jpaged.service.chat.process import CPU_S, OutOfTimeError, TemplateProcess

_FIELD = "chat.messages"
_KWARGS = "chat_template_kwargs"
_TRIAL = ({"role": "user", "content": "Hello"},)
_TRIAL_BYTES = 1 << 20
_OURS = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"),
        *("conversations", "chat_template", "return_assistant_tokens_mask", "continue_final_message"),
    }
)
"""Names that no caller sets: those of transformers' function that renders, and what it gives a template."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_EFFORT = "reasoning_effort"
_DEVELOPER = "developer"
"""OpenAI's newer name of the role that gives instructions; templates print a role that they do not know as it is."""
_SWITCHES = ("enable_thinking", "thinking")
"""The variables that have a model think or not: Qwen's and DeepSeek's."""


class ChatTemplate:
    """A template that is known to work. Safe to call from several threads.

    Args:
        variables: what it may name besides the messages: the special tokens.
        name: whose template it is, for errors.

    Attributes:
        source: its text.
        uses_tools: it looks at the tools that a caller gives.

    Raises:
        InvalidArgument: it fails on a plain message of a user. One that refuses it, by `raise_exception`, works.
    """

    def __init__(
        self, process: TemplateProcess, source: str, variables: Mapping[str, Any], *, name: str = "this model"
    ) -> None:
        self._process = process
        self._variables = variables
        self._name = name
        self.source = source
        try:
            kind, text = process.render(source, variables, _TRIAL, _TRIAL_BYTES)
            if kind in (Kind.RENDERED, Kind.RAISED):
                kind, text = process.names(source)
        except OutOfTimeError:
            kind, text = Kind.OVER, f"{CPU_S} s of processor time"
        if kind is not Kind.NAMES:
            what = {Kind.OVER: "passes its limit", Kind.LONG: "makes too many bytes"}.get(kind, "fails")
            raise InvalidArgument("model", f"its chat template {what} on one plain message of a user: {text}")
        names = frozenset(json.loads(text))
        self.uses_tools = "tools" in names
        self._settable = names - _OURS - variables.keys()

    def reasoning_variables(self, reasoning: ReasoningOptions, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The variables that have a model think as it is asked to.

        Args:
            kwargs: those that the caller sets by name.

        Raises:
            InvalidArgument: the template has no such variable, or the caller sets it by name too.
        """
        asked = {"effort": (reasoning.effort, (_EFFORT,)), "enabled": (reasoning.enabled, _SWITCHES)}
        variables: dict[str, Any] = {}
        for field, (value, names) in asked.items():
            if value is None:
                continue
            name = next((name for name in names if name in self._settable), None)
            if name is None:
                raise InvalidArgument(f"reasoning.{field}", f"the chat template has no variable {' or '.join(names)}")
            if name in kwargs:
                raise InvalidArgument(f"reasoning.{field}", f"and {_KWARGS}.{name} are one thing: give one of them")
            variables[name] = value
        return variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_bytes: int,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] = _NOTHING,
    ) -> str:
        """The conversation, up to where the assistant's turn begins.

        Args:
            tools: as `Tool.as_json` has them.
            kwargs: variables of the template, which it must use.

        Raises:
            InvalidArgument: the template refuses the messages, in its own words, cannot cope with them, or does not use
                a variable.
            RequestTooLong: more than max_bytes come of them.
            Unsupported: there are tools, of which the template takes no notice.
            Unavailable: the process that renders is gone.
        """
        if tools and not self.uses_tools and not has_built_in_tools(self.source):
            raise Unsupported(f"tools: the chat template of {self._name} does not use any")
        for name in kwargs.keys() - self._settable:
            known = ", ".join(sorted(self._settable)) or "none"
            raise InvalidArgument(f"{_KWARGS}.{name}", f"is no variable of the chat template; it has {known}")
        variables = {**self._variables, **kwargs}
        failure = None
        known = self._in_known_roles(messages)
        has_calls = "tool_calls" not in self.source and any(map(_has_call, known))
        if has_built_in_tools(self.source) and (tools or has_calls):
            return self._render_built_in(known, variables, max_bytes, tools)
        for form in forms(known):
            kind, text = self._outcome(form, variables, max_bytes, tools)
            if kind is not Kind.FAILED:
                return _text_of(kind, text, max_bytes)
            failure = failure or InvalidArgument(_FIELD, f"the chat template fails on them: {text}")
        assert failure is not None
        raise failure

    def _render_built_in(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        max_bytes: int,
        tools: Sequence[Mapping[str, Any]],
    ) -> str:
        """Return the conversation with tools as text: in the system's message, or in the user's if there is none."""
        kind, text = self._outcome(with_built_in_tools(messages, tools), variables, max_bytes, ())
        is_dropped = kind is Kind.RENDERED and tools and "</tools>" not in text
        if kind in (Kind.RAISED, Kind.FAILED) or is_dropped:
            in_user = with_built_in_tools(messages, tools, is_system=False)
            kind, text = self._outcome(in_user, variables, max_bytes, ())
        if kind is Kind.FAILED:
            raise InvalidArgument(_FIELD, f"the chat template fails on them: {text}")
        return _text_of(kind, text, max_bytes)

    def _in_known_roles(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The messages, a developer's as the system's where the template does not tell them apart."""
        if _DEVELOPER in self.source:
            return messages
        return [{**one, "role": "system"} if one.get("role") == _DEVELOPER else one for one in messages]

    def _outcome(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        max_bytes: int,
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[Kind, str]:
        try:
            return self._process.render(self.source, variables, messages, max_bytes, tools=list(tools) or None)
        except OutOfTimeError as error:
            raise InvalidArgument(_FIELD, f"the chat template takes over {CPU_S} s of processor time") from error
        except (TypeError, ValueError) as error:
            raise InvalidArgument(_FIELD, f"hold something that is no text: {error}") from error


def _has_call(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls")) or message.get("role") == "tool"


def _text_of(kind: Kind, text: str, max_bytes: int) -> str:
    if kind is Kind.RAISED:
        raise InvalidArgument(_FIELD, text)
    if kind is Kind.LONG:
        raise RequestTooLong(_FIELD, f"the chat template makes {text} bytes of them, over the limit of {max_bytes}")
    if kind is Kind.OVER:
        raise InvalidArgument(_FIELD, f"the chat template takes over {text}")
    return text
