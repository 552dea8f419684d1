"""Answer formats of model families, by the names of vLLM's `--tool-call-parser` and `--reasoning-parser`.

A model's format is detected from its chat template, which writes calls of earlier turns as the model does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from jpaged.errors import InvalidArgument
from jpaged.service.chat.output_parser import HarmonyParser, Parser, PlainParser, ReasoningParser
from jpaged.service.chat.tool_parser import (
    HermesParser,
    Llama3JsonParser,
    MistralParser,
    NewId,
    PieceWriter,
    call_id,
    short_call_id,
)

AUTO, NONE = "auto", "none"
_HARMONY_START = "<|start|>assistant"
_DEEPSEEK_TURN = "<\uff5cAssistant\uff5c>"
"""With full-width bars, like all of DeepSeek's special tokens."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A family's format of tool calls.

    Attributes:
        name: the name in vLLM's `--tool-call-parser`.
        make: makes the parser of one answer.
        needs_special_tokens: the tags are special tokens, so the text must keep them (`skip_special_tokens=False`).
            Other formats' tags are special tokens in some tokenizers: see `special_tags`.
        tags: texts that are, or may be, special tokens of the tokenizer.
        begins: texts before a call's arguments, with NAME for the function's name; the first is the usual one.
        end: the text after the arguments.
        triggers: prefixes of `begins`; each of `begins` starts with one of these.
        between: a regular expression of the text after each of several calls; it must match the empty text and no line
            breaks. A model that writes a line break there often continues with text, and the grammar would force a
            call.
        new_id: makes the id of a call.
        is_in_channels: an answer is a list of messages, each in a channel, and a call is the last message.
    """

    name: str
    make: Callable[[PieceWriter], Parser]
    needs_special_tokens: bool
    tags: tuple[str, ...]
    begins: tuple[str, ...]
    end: str
    triggers: tuple[str, ...]
    between: str = ""
    new_id: NewId = call_id
    is_in_channels: bool = False


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A family's format of reasoning.

    Attributes:
        name: the name in vLLM's `--reasoning-parser`.
        open_tag: the opening tag.
        close_tag: the closing tag.
        is_open_unless_closed: an answer begins with reasoning even without an opening tag, unless the prompt closed it.
        needs_special_tokens: the tags are special tokens, as in `ToolFormat`.
        is_whole_answer: the family's tool parser also parses its reasoning.
    """

    name: str
    open_tag: str
    close_tag: str
    is_open_unless_closed: bool = False
    needs_special_tokens: bool = False
    is_whole_answer: bool = False


_HARMONY_CALL = "<|channel|>commentary to=functions."
_HARMONY_TAGS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
TOOL_FORMATS = {
    one.name: one
    for one in (
        ToolFormat(
            name="hermes",
            make=HermesParser,
            needs_special_tokens=False,
            tags=("<tool_call>", "</tool_call>"),
            begins=('<tool_call>\n{"name": "NAME", "arguments": ',),
            end="}\n</tool_call>",
            triggers=("<tool_call>",),
        ),
        ToolFormat(
            name="llama3_json",
            make=Llama3JsonParser,
            needs_special_tokens=True,
            tags=("<|python_tag|>",),
            begins=('{"name": "NAME", "parameters": ',),
            end="}",
            triggers=('{"name": "',),
            between="(; ?)?",
        ),
        ToolFormat(
            name="mistral",
            make=MistralParser,
            needs_special_tokens=True,
            tags=("[TOOL_CALLS]",),
            begins=('[TOOL_CALLS] [{"name": "NAME", "arguments": ',),
            end="}]",
            triggers=("[TOOL_CALLS]",),
            new_id=short_call_id,
        ),
        ToolFormat(
            name="mistral_args",
            make=MistralParser,
            needs_special_tokens=True,
            tags=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
            begins=("[TOOL_CALLS]NAME[ARGS]",),
            end="",
            triggers=("[TOOL_CALLS]",),
            new_id=short_call_id,
        ),
        ToolFormat(
            name="openai",
            make=HarmonyParser,
            needs_special_tokens=True,
            tags=_HARMONY_TAGS,
            begins=tuple(f"{start}{_HARMONY_CALL}NAME <|constrain|>json<|message|>" for start in ("", _HARMONY_START)),
            end="<|call|>",
            triggers=(_HARMONY_CALL, _HARMONY_START + _HARMONY_CALL),
            is_in_channels=True,
        ),
    )
}
REASONING_FORMATS = {
    one.name: one
    for one in (
        ReasoningFormat("qwen3", "<think>", "</think>"),
        ReasoningFormat("deepseek_r1", "<think>", "</think>", is_open_unless_closed=True),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]", needs_special_tokens=True),
        ReasoningFormat(
            "openai_gptoss",
            "<|channel|>analysis<|message|>",
            "<|end|>",
            needs_special_tokens=True,
            is_whole_answer=True,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """A model's answer format. If a part is None, text of that kind is content.

    Attributes:
        tools: the format of calls.
        reasoning: the format of reasoning.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    def needs_special_tokens(self, special_tokens: Collection[str], *, has_tools: bool = True) -> bool:
        """Return True if text must keep special tokens (`skip_special_tokens=False`) for the parser to see its tags.

        Args:
            special_tokens: those of the tokenizer: a tag that is one counts, whatever the family.
            has_tools: the request has tools.
        """
        parts = [part for part in (self.tools if has_tools else None, self.reasoning) if part is not None]
        tags = [tag for part in parts for tag in _get_tags(part)]
        return any(part.needs_special_tokens for part in parts) or any(tag in special_tokens for tag in tags)

    def has_tag(self, token: str) -> bool:
        """Return True if a token is part of the family's markup of calls or reasoning."""
        tools = () if self.tools is None else (*self.tools.begins, *self.tools.triggers, self.tools.end)
        reasoning = () if self.reasoning is None else (self.reasoning.open_tag, self.reasoning.close_tag)
        tags = [tag for part in (self.tools, self.reasoning) if part is not None for tag in _get_tags(part)]
        return any(token in text for text in (*tools, *reasoning, *tags))

    def is_open(self, prompt_tail: str) -> bool:
        """Return True if an answer to this prompt begins inside its reasoning.

        Args:
            prompt_tail: the end of the prompt's text, special tokens kept: at least a dozen tokens.
        """
        if self.reasoning is None:
            return False
        tail = prompt_tail.rstrip()
        if self.reasoning.is_open_unless_closed:
            return not tail.endswith(self.reasoning.close_tag)
        return tail.endswith(self.reasoning.open_tag)

    def parser(
        self,
        *,
        is_open: bool,
        has_tools: bool = True,
        new_id: NewId | None = None,
        tool_names: Collection[str] = (),
    ) -> Parser:
        """Return a parser of one answer.

        Args:
            is_open: see `is_open`.
            has_tools: the request has tools. Without tools, text that looks like a call is content (except for gpt-oss,
                whose single parser handles everything).
            new_id: makes the ids of calls; None for the family's default.
            tool_names: names of the request's tools.
        """
        tools = self.tools if has_tools else None
        new_id = new_id or (call_id if tools is None else tools.new_id)
        writer = PieceWriter(new_id, tool_names)
        if self.reasoning is not None and self.reasoning.is_whole_answer:
            return HarmonyParser(writer)
        make = PlainParser if tools is None else tools.make
        if self.reasoning is None:
            return make(writer)
        tags = (self.reasoning.open_tag, self.reasoning.close_tag)
        return ReasoningParser(tags, make, is_open=is_open, inner_writer=writer)


def _get_tags(part: ToolFormat | ReasoningFormat) -> tuple[str, ...]:
    return part.tags if isinstance(part, ToolFormat) else (part.open_tag, part.close_tag)


def parser_for(
    template: str | None, architecture: str, *, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
) -> AnswerFormat:
    """Return the answer format of a model.

    Args:
        template: source of the model's chat template; None if it has none.
        architecture: as its config names it, such as `DeepseekV3ForCausalLM`; distinguishes models with equal
            templates.
        tool_call_parser: a name of `TOOL_FORMATS`, "none", or "auto" to detect it.
        reasoning_parser: the same for `REASONING_FORMATS`.

    Raises:
        InvalidArgument: there is no format of that name.
    """
    text = template or ""
    tools = _named("tool_call_parser", tool_call_parser, _tool_format(text), TOOL_FORMATS)
    reasoning = _named("reasoning_parser", reasoning_parser, _reasoning_format(text, architecture), REASONING_FORMATS)
    if tools == "mistral" and "[ARGS]" in text:
        tools = "mistral_args"
    return AnswerFormat(
        tools=None if tools is None else TOOL_FORMATS[tools],
        reasoning=None if reasoning is None else REASONING_FORMATS[reasoning],
    )


def _named(option: str, name: str, detected: str | None, known: Mapping[str, object]) -> str | None:
    if name == AUTO:
        return detected
    if name == NONE:
        return None
    if name not in known:
        raise InvalidArgument(option, f"{name!r} is not one of {', '.join((AUTO, NONE, *known))}")
    return name


def _tool_format(template: str) -> str | None:
    """Return the tool format detected in a template.

    Formats share some marks, so the distinctive marks of others rule them out.
    """
    if "<|channel|>" in template and "functions." in template:
        return "openai"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        is_other = any(mark in template for mark in ("<function=", "<arg_key>"))  # Qwen 3 Coder, GLM
        return None if is_other else "hermes"
    has_headers = "<|start_header_id|>" in template or "<|header_start|>" in template
    if has_headers and "tool_calls" in template and '"parameters"' in template:
        return "llama3_json"
    return "hermes" if has_built_in_tools(template) else None


def has_built_in_tools(template: str) -> bool:
    """Return True if a chat template ignores tools, so that the prompt of `with_built_in_tools` must describe them."""
    return bool(template) and "tools" not in template


def _reasoning_format(template: str, architecture: str) -> str | None:
    if "<|channel|>" in template and "analysis" in template:
        return "openai_gptoss"
    if "[THINK]" in template:
        return "mistral"
    if "</think>" not in template:
        return None
    is_deepseek = _DEEPSEEK_TURN in template or architecture.startswith("Deepseek")
    return "deepseek_r1" if is_deepseek else "qwen3"
