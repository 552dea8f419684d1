"""Options of a chat: everything except the messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, Unpack

from jpaged.chat.json_bounds import json_bytes
from jpaged.chat.tools import (
    MAX_TOOL_BYTES,
    MAX_TOOLS,
    Tool,
    ToolChoice,
    ToolChoiceMode,
    check_unique,
    tool_choice_of,
    tools_of,
)
from jpaged.errors import InvalidArgument

MAX_TEMPLATE_KWARGS = 32
MAX_TEMPLATE_KWARGS_BYTES = 16 << 10
MAX_CHAT_TEMPLATE_BYTES = 256 << 10
MAX_DOCUMENTS = 128
MAX_DOCUMENTS_BYTES = 1 << 20
MAX_EFFORT_CHARS = 64
MAX_THINKING_TOKEN_BUDGET = 1 << 20
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """Options for the reasoning of a model, and its output.

    Attributes:
        effort: the chat template's variable `reasoning_effort`, such as "low"; None leaves it to the template.
        enabled: switch thinking on or off, by the chat template's variable `enable_thinking` or `thinking`; None leaves
            it to the template.
        thinking_token_budget: maximum tokens of thinking; None for no limit.
        include: return the reasoning; False drops it.

    Raises:
        InvalidArgument: a value is out of range; the field is named as in `reasoning.effort`.
    """

    effort: str | None = None
    enabled: bool | None = None
    thinking_token_budget: int | None = None
    include: bool = True

    def __post_init__(self) -> None:
        effort, budget = self.effort, self.thinking_token_budget
        if effort is not None and not (isinstance(effort, str) and 1 <= len(effort) <= MAX_EFFORT_CHARS):
            limit = f"a string of 1 to {MAX_EFFORT_CHARS} characters"
            raise InvalidArgument("reasoning.effort", f"{str(effort)[:_MAX_SHOWN]!r} is not {limit}")
        json_bytes("reasoning.effort", effort, max_bytes=8 * MAX_EFFORT_CHARS)
        if self.enabled is not None and not isinstance(self.enabled, bool):
            raise InvalidArgument("reasoning.enabled", f"{str(self.enabled)[:_MAX_SHOWN]!r} is not true or false")
        if budget is not None and not (type(budget) is int and 0 <= budget <= MAX_THINKING_TOKEN_BUDGET):
            limit = f"an integer from 0 to {MAX_THINKING_TOKEN_BUDGET}"
            raise InvalidArgument("reasoning.thinking_token_budget", f"{str(budget)[:_MAX_SHOWN]} is not {limit}")
        if not isinstance(self.include, bool):
            raise InvalidArgument("reasoning.include", f"{str(self.include)[:_MAX_SHOWN]!r} is not true or false")

    @property
    def sets_variables(self) -> bool:
        """True if the chat template must support it."""
        return self.effort is not None or self.enabled is not None


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of a chat: everything except the messages.

    Attributes:
        template_kwargs: variables of the template, such as `enable_thinking`; JSON values. Names that the template does
            not use have no effect.
        tool_choice: None is "auto" with tools, and "none" without.
        parallel_tool_calls: an answer may have several calls.
        add_generation_prompt: open the assistant's turn after the messages.
        continue_final_message: continue the last message, which stays open, instead of a new turn.
        documents: JSON objects for a template that uses them.
        chat_template: replaces the model's, on servers that trust those of requests; None for the model's.

    Raises:
        InvalidArgument: values too many or too large, an invalid name, two tools of one name, or a choice of a missing
            tool.
    """

    tools: Sequence[Tool] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: Sequence[Mapping[str, Any]] = ()
    chat_template: str | None = None

    def __post_init__(self) -> None:
        for flag in ("add_generation_prompt", "continue_final_message"):
            if not isinstance(value := getattr(self, flag), bool):
                raise InvalidArgument(flag, f"{str(value)[:_MAX_SHOWN]!r} is not true or false")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidArgument("continue_final_message", "does not go with add_generation_prompt of true")
        self._check_documents()
        if self.chat_template is not None and (not isinstance(self.chat_template, str) or not self.chat_template):
            raise InvalidArgument("chat_template", "must be the text of a template")
        json_bytes("chat_template", self.chat_template, max_bytes=MAX_CHAT_TEMPLATE_BYTES)
        if len(self.tools) > MAX_TOOLS:
            raise InvalidArgument("tools", f"{len(self.tools)} tools; at most {MAX_TOOLS}")
        check_unique(self.tools, "tools")
        self._check_choice()
        path, kwargs = "chat_template_kwargs", self.template_kwargs
        if not isinstance(kwargs, Mapping):
            raise InvalidArgument(path, "must be a JSON object")
        if len(kwargs) > MAX_TEMPLATE_KWARGS:
            raise InvalidArgument(path, f"{len(kwargs)} variables; at most {MAX_TEMPLATE_KWARGS}")
        for name in kwargs:
            if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name):
                raise InvalidArgument(path, f"{str(name)[:_MAX_SHOWN]!a} is no name of a variable")
        json_bytes(path, kwargs, max_bytes=MAX_TEMPLATE_KWARGS_BYTES)

    def _check_documents(self) -> None:
        documents = self.documents
        if not isinstance(documents, Sequence) or isinstance(documents, str):
            raise InvalidArgument("documents", "must be a list of JSON objects")
        if len(documents) > MAX_DOCUMENTS:
            raise InvalidArgument("documents", f"{len(documents)} documents; at most {MAX_DOCUMENTS}")
        for i, one in enumerate(documents):
            if not isinstance(one, Mapping):
                raise InvalidArgument(f"documents[{i}]", "must be a JSON object")
        json_bytes("documents", documents, max_bytes=MAX_DOCUMENTS_BYTES)

    def _check_choice(self) -> None:
        if not isinstance(self.parallel_tool_calls, bool):
            shown = str(self.parallel_tool_calls)[:_MAX_SHOWN]
            raise InvalidArgument("parallel_tool_calls", f"{shown!r} is not true or false")
        choice = self.tool_choice
        if choice is None:
            return
        if choice.mode is ToolChoiceMode.REQUIRED and not self.tools:
            raise InvalidArgument("tool_choice", "'required' needs tools")
        is_named = choice.mode is ToolChoiceMode.NAMED
        if is_named and not any(tool.name == choice.name for tool in self.tools):
            raise InvalidArgument("tool_choice", f"{str(choice.name)[:_MAX_SHOWN]!r} is the name of none of the tools")
        if not is_named and choice.name is not None:
            raise InvalidArgument("tool_choice", f"{choice.mode.value!r} has no name of a function")

    @property
    def choice(self) -> ToolChoice:
        """The tool choice; "none" without tools."""
        if not self.tools:
            return ToolChoice(ToolChoiceMode.NONE)
        return self.tool_choice or ToolChoice(ToolChoiceMode.AUTO)

    @property
    def shown_tools(self) -> Sequence[Tool]:
        """The tools in the prompt: none if the model may call none."""
        return () if self.choice.mode is ToolChoiceMode.NONE else self.tools

    @property
    def is_laid_out(self) -> bool:
        """True if the chat template must support it."""
        is_usual = self.add_generation_prompt and not (self.documents or self.chat_template)
        return not is_usual or bool(self.shown_tools or self.template_kwargs) or self.reasoning.sets_variables

    @property
    def num_bytes(self) -> int:
        """Approximate size as JSON."""
        tools = [tool.as_json() for tool in self.tools]
        whole = {"tools": tools, "kwargs": self.template_kwargs, "documents": self.documents}
        return json_bytes("tools", whole, max_bytes=2 * MAX_TOOLS * MAX_TOOL_BYTES + MAX_DOCUMENTS_BYTES + (1 << 20))


class ChatWords(TypedDict, total=False):
    """Options of a chat as keywords, in OpenAI's format; None selects the default of each.

    Attributes:
        tools: tools that the model may call, each as JSON or a `Tool`.
        tool_choice: "none", "auto", "required", a function (`{"type": "function", "function": {"name": ...}}`), or a
            `ToolChoice`; "auto" by default if there are tools.
        parallel_tool_calls: False limits an answer to one call.
        chat_template_kwargs: variables of the chat template.
        reasoning: reasoning options: an object with the fields of `ReasoningOptions`, or a `ReasoningOptions`.
        add_generation_prompt: open the assistant's turn after the messages; False by default with
            `continue_final_message`.
        continue_final_message: continue the last message instead of a new turn.
        documents: JSON objects for a template that uses them.
        chat_template: replaces the model's, on servers with `--trust-request-chat-template`.
    """

    tools: Sequence[Tool | Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | ToolChoice | None
    parallel_tool_calls: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    reasoning: ReasoningOptions | Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    documents: Sequence[Mapping[str, Any]] | None
    chat_template: str | None


def chat_options_of(**words: Unpack[ChatWords]) -> ChatOptions:
    """Build ChatOptions from keywords.

    Raises:
        InvalidArgument: names the field, as in `tools[2].function.name`; or a keyword is not in `ChatWords`.
    """
    for name in words.keys() - ChatWords.__annotations__.keys():
        raise InvalidArgument(name, f"is not known; {', '.join(ChatWords.__annotations__)} are")
    tools, choice = tools_of(words.get("tools")), words.get("tool_choice")
    kwargs, is_parallel = words.get("chat_template_kwargs"), words.get("parallel_tool_calls")
    if choice is not None and not isinstance(choice, ToolChoice):
        choice = tool_choice_of(choice, tools)
    continues, opens = words.get("continue_final_message") or False, words.get("add_generation_prompt")
    documents = words.get("documents")
    return ChatOptions(
        tools=tools,
        template_kwargs={} if kwargs is None else kwargs,
        tool_choice=choice,
        parallel_tool_calls=True if is_parallel is None else is_parallel,
        reasoning=reasoning_of(words.get("reasoning")),
        add_generation_prompt=continues is not True if opens is None else opens,
        continue_final_message=continues,
        documents=tuple(documents) if isinstance(documents, list) else documents or (),
        chat_template=words.get("chat_template") or None,
    )


def reasoning_of(value: Any) -> ReasoningOptions:
    """Parse `ReasoningOptions` from an object; None gives the defaults.

    Raises:
        InvalidArgument: names the field, as in `reasoning.effort`.
    """
    if value is None or isinstance(value, ReasoningOptions):
        return value or ReasoningOptions()
    if not isinstance(value, Mapping):
        raise InvalidArgument("reasoning", "must be a JSON object")
    known = {one.name for one in fields(ReasoningOptions)}
    for name in value:
        if name not in known:
            shown = str(name)[:_MAX_SHOWN]
            raise InvalidArgument(f"reasoning.{shown}", f"is not supported; {', '.join(sorted(known))} are")
    return ReasoningOptions(**{name: one for name, one in value.items() if one is not None})
