"""Answer formats of model families, by the names of vLLM's `--tool-call-parser` and `--reasoning-parser`.

A model's format is detected from its chat template, which writes calls of earlier turns as the model does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from jpaged.errors import InvalidArgument
from jpaged.service.chat.markup_parser import (
    CALL_ID,
    INDEX,
    CallListParser,
    CallMarkup,
    ListMarkup,
    MarkupParser,
    ParameterTags,
)
from jpaged.service.chat.output_parser import HarmonyParser, Parser, PlainParser, ReasoningParser, ReasoningTags
from jpaged.service.chat.tool_parser import (
    NO_SCHEMAS,
    HermesParser,
    JsonListParser,
    Llama3JsonParser,
    MistralParser,
    NewId,
    PieceWriter,
    Schemas,
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
        begins: texts before a call's arguments, with NAME for the function's name; the first is the usual one. `INDEX`
            and `CALL_ID` may stand in it.
        end: the text after the arguments.
        triggers: texts of which one begins each call or section; without any, calls come only at the start of an
            answer.
        section: texts before the first of several calls, and after the last one.
        separator: the text between calls of a section.
        arguments: how the arguments are written; None for a JSON object.
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
    section: tuple[str, str] = ("", "")
    separator: str = ""
    arguments: ParameterTags | ListMarkup | None = None
    between: str = ""
    new_id: NewId = call_id
    is_in_channels: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts around calls and their arguments."""
        one = self.arguments
        inner: tuple[str, ...] = ()
        if isinstance(one, ParameterTags):
            inner = (one.begin, *one.key_ends, one.value_begin, one.end)
        elif one is not None:
            inner = (one.quote,)
        return (*self.begins, *self.triggers, self.end, *self.section, *inner)


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
        other_tags: other spellings of the opening and the closing tag.
        following: tags that end reasoning that is not closed, and belong to the content.
    """

    name: str
    open_tag: str
    close_tag: str
    is_open_unless_closed: bool = False
    needs_special_tokens: bool = False
    is_whole_answer: bool = False
    other_tags: tuple[tuple[str, str], ...] = ()
    following: tuple[str, ...] = ()

    @property
    def tags(self) -> ReasoningTags:
        pairs = ((self.open_tag, self.close_tag), *self.other_tags)
        return ReasoningTags(tuple(one for one, _ in pairs), tuple(one for _, one in pairs), self.following)


def _markup_format(name: str, markup: CallMarkup, *, needs_special_tokens: bool = False) -> ToolFormat:
    """Return the format of calls in a `CallMarkup`."""
    opener, closer = markup.section
    begin, end = f"{markup.begin}{markup.name}{markup.name_end}", markup.end
    if markup.is_section_of_one:
        begin, end, opener, closer = f"{opener}{begin}", f"{end}{closer}", "", ""
    return ToolFormat(
        name=name,
        make=partial(MarkupParser, markup=markup),
        needs_special_tokens=needs_special_tokens,
        tags=markup.tags,
        begins=(begin,),
        end=end,
        triggers=((markup.section[0] or markup.begin).rstrip(),),
        section=(opener, closer),
        arguments=markup.parameters,
    )


def _list_format(name: str, markup: ListMarkup, *, needs_special_tokens: bool) -> ToolFormat:
    """Return the format of calls in a `ListMarkup`."""
    tag = "" if markup.is_untagged else markup.tags[0]
    opener, closer = (f"{tag}[", f"]{'' if markup.is_untagged else markup.close_tag}") if markup.is_list else ("", "")
    begin, end = f"{markup.before_name}NAME{markup.brackets[0]}", markup.brackets[1]
    if not markup.is_list:
        begin, end = f"{tag}{begin}", f"{end}{markup.close_tag}"
    return ToolFormat(
        name=name,
        make=partial(CallListParser, markup=markup),
        needs_special_tokens=needs_special_tokens,
        tags=tuple(text for text in (*markup.tags, markup.close_tag, markup.quote) if text),
        begins=(begin,),
        end=end,
        triggers=() if markup.is_untagged else (tag,),
        section=(opener, closer),
        separator=", " if markup.is_list else "",
        arguments=markup,
    )


_LINES = ParameterTags("<parameter=", (">\n",), "\n</parameter>\n")
_QWEN3_CODER = CallMarkup(
    begin="<function=",
    name_end=">\n",
    end="</function>",
    parameters=_LINES,
    section=("<tool_call>\n", "\n</tool_call>"),
    is_section_of_one=True,
)
_GLM45 = CallMarkup(
    begin="<tool_call>",
    name_end="\n",
    end="</tool_call>",
    parameters=ParameterTags("<arg_key>", ("</arg_key>",), "</arg_value>\n", "\n<arg_value>"),
)
_GLM47 = CallMarkup(
    begin="<tool_call>",
    name_end="",
    end="</tool_call>",
    parameters=ParameterTags("<arg_key>", ("</arg_key>",), "</arg_value>", "<arg_value>"),
)
_MINIMAX_M2 = CallMarkup(
    begin='<invoke name="',
    name_end='">\n',
    end="</invoke>\n",
    parameters=ParameterTags('<parameter name="', ('">',), "</parameter>\n"),
    section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
)
_SEED_OSS = CallMarkup(
    begin="<function=",
    name_end=">\n",
    end="</function>",
    parameters=ParameterTags("<parameter=", (">",), "</parameter>\n"),
    section=("<seed:tool_call>\n", "\n</seed:tool_call>"),
    is_section_of_one=True,
)
_DEEPSEEK_V32 = CallMarkup(
    begin='<\uff5cDSML\uff5cinvoke name="',
    name_end='">\n',
    end="</\uff5cDSML\uff5cinvoke>\n",
    parameters=ParameterTags(
        begin='<\uff5cDSML\uff5cparameter name="',
        key_ends=('" string="true">', '" string="false">'),
        end="</\uff5cDSML\uff5cparameter>\n",
    ),
    section=("<\uff5cDSML\uff5cfunction_calls>\n", "</\uff5cDSML\uff5cfunction_calls>"),
)
_DEEPSEEK_V4 = replace(_DEEPSEEK_V32, section=("<\uff5cDSML\uff5ctool_calls>\n", "</\uff5cDSML\uff5ctool_calls>"))
_DEEPSEEK_SECTION = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
)
_DEEPSEEK_CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>"
_DEEPSEEK_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_DEEPSEEK_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
_DEEPSEEK_V31 = CallMarkup(_DEEPSEEK_CALL, _DEEPSEEK_SEPARATOR, _DEEPSEEK_END, section=_DEEPSEEK_SECTION)
_DEEPSEEK_V3 = CallMarkup(
    begin=f"{_DEEPSEEK_CALL}function{_DEEPSEEK_SEPARATOR}",
    name_end="\n```json\n",
    end=f"\n```{_DEEPSEEK_END}",
    section=_DEEPSEEK_SECTION,
)
_KIMI_K2 = CallMarkup(
    begin="<|tool_call_begin|>",
    name_end="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    name=f"functions.NAME:{INDEX}",
)
_PYTHONIC = ListMarkup(("<|python_start|>",), "<|python_end|>", is_untagged=True)
_LFM2 = ListMarkup(("<|tool_call_start|>",), "<|tool_call_end|>")
_FUNCTIONGEMMA = ListMarkup(
    tags=("<start_function_call>",),
    close_tag="<end_function_call>",
    before_name="call:",
    brackets=("{", "}"),
    assign=":",
    quote="<escape>",
    is_list=False,
)
_GEMMA4 = ListMarkup(
    tags=("<|tool_call>",),
    close_tag="<tool_call|>",
    before_name="call:",
    brackets=("{", "}"),
    assign=":",
    quote='<|"|>',
    is_list=False,
)

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
            begins=('{"name": "NAME", "arguments": ',),
            end="}",
            triggers=("[TOOL_CALLS]",),
            section=("[TOOL_CALLS] [", "]"),
            separator=", ",
            new_id=short_call_id,
        ),
        ToolFormat(
            name="mistral_args",
            make=MistralParser,
            needs_special_tokens=True,
            tags=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
            begins=(f"[TOOL_CALLS]NAME{CALL_ID}[ARGS]",),
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
        ToolFormat(
            name="granite",
            make=partial(JsonListParser, tags=("<|tool_call|>", "<tool_call>"), close_tag="</tool_call>"),
            needs_special_tokens=True,
            tags=("<|tool_call|>", "<tool_call>", "</tool_call>"),
            begins=('{"name": "NAME", "arguments": ',),
            end="}",
            triggers=("<|tool_call|>",),
            section=("<|tool_call|>[", "]"),
            separator=", ",
        ),
        _markup_format("qwen3_coder", _QWEN3_CODER),
        _markup_format("glm45", _GLM45),
        _markup_format("glm47", _GLM47),
        _markup_format("minimax_m2", _MINIMAX_M2),
        _markup_format("seed_oss", _SEED_OSS),
        _markup_format("deepseek_v3", _DEEPSEEK_V3, needs_special_tokens=True),
        _markup_format("deepseek_v31", _DEEPSEEK_V31, needs_special_tokens=True),
        _markup_format("deepseek_v32", _DEEPSEEK_V32, needs_special_tokens=True),
        _markup_format("deepseek_v4", _DEEPSEEK_V4, needs_special_tokens=True),
        _markup_format("kimi_k2", _KIMI_K2, needs_special_tokens=True),
        _list_format("pythonic", _PYTHONIC, needs_special_tokens=False),
        _list_format("lfm2", _LFM2, needs_special_tokens=True),
        _list_format("functiongemma", _FUNCTIONGEMMA, needs_special_tokens=True),
        _list_format("gemma4", _GEMMA4, needs_special_tokens=True),
    )
}
TOOL_ALIASES = MappingProxyType(
    {
        "qwen3_xml": "qwen3_coder",
        "mimo": "qwen3_coder",
        "step3p5": "qwen3_coder",
        "poolside_v1": "glm45",
        "ling3": "glm45",
        "llama4_json": "llama3_json",
        "llama4_pythonic": "pythonic",
        "granite4": "hermes",
    }
)
"""Other names that vLLM has for these formats."""
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
        ReasoningFormat(
            "granite",
            "Here is my thought process:",
            "Here is my response:",
            other_tags=(("Here's my thought process:", "Here's my response:"),),
        ),
        ReasoningFormat("gemma4", "<|channel>thought", "<channel|>", needs_special_tokens=True),
        ReasoningFormat("kimi_k2", "<think>", "</think>", following=(_KIMI_K2.section[0],)),
        ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    )
}
REASONING_ALIASES = MappingProxyType(
    {
        **dict.fromkeys(("glm45", "glm47", "mimo"), "qwen3"),
        **dict.fromkeys(("deepseek_v3", "minimax_m2", "nemotron_v3", "olmo3", "holo2", "step3"), "deepseek_r1"),
    }
)
"""Other names that vLLM has for these formats."""


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
        tools = () if self.tools is None else self.tools.texts
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
            return not tail.endswith(self.reasoning.tags.closing)
        return tail.endswith(self.reasoning.tags.opening)

    def parser(
        self,
        *,
        is_open: bool,
        has_tools: bool = True,
        new_id: NewId | None = None,
        schemas: Schemas = NO_SCHEMAS,
    ) -> Parser:
        """Return a parser of one answer.

        Args:
            is_open: see `is_open`.
            has_tools: the request has tools. Without tools, text that looks like a call is content (except for gpt-oss,
                whose single parser handles everything).
            new_id: makes the ids of calls; None for the family's default.
            schemas: the request's tools: name -> JSON schema of the arguments.
        """
        tools = self.tools if has_tools else None
        new_id = new_id or (call_id if tools is None else tools.new_id)
        writer = PieceWriter(new_id, schemas)
        if self.reasoning is not None and self.reasoning.is_whole_answer:
            return HarmonyParser(writer)
        make = PlainParser if tools is None else tools.make
        if self.reasoning is None:
            return make(writer)
        return ReasoningParser(self.reasoning.tags, make, is_open=is_open, inner_writer=writer)


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
        tool_call_parser: a name of `TOOL_FORMATS` or `TOOL_ALIASES`, "none", or "auto" to detect it.
        reasoning_parser: the same for `REASONING_FORMATS` and `REASONING_ALIASES`.

    Raises:
        InvalidArgument: there is no format of that name.
    """
    text = template or ""
    tool_name = TOOL_ALIASES.get(tool_call_parser, tool_call_parser)
    reasoning_name = REASONING_ALIASES.get(reasoning_parser, reasoning_parser)
    tools = _named("tool_call_parser", tool_name, _tool_format(text), TOOL_FORMATS)
    reasoning = _named("reasoning_parser", reasoning_name, _reasoning_format(text, architecture), REASONING_FORMATS)
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


_TOOL_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "functions.")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("functiongemma", ("<start_function_call>",)),
    ("gemma4", ("<|tool_call>call:",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("deepseek_v32", ("DSML", "function_calls")),
    ("deepseek_v4", ("DSML", "tool_calls>")),
    ("deepseek_v3", (_DEEPSEEK_CALL, "```json", "tools")),
    ("deepseek_v31", (_DEEPSEEK_CALL, "tools")),
    ("kimi_k2", ("<|tool_call_begin|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("granite", ("<|tool_call|>", "<|start_of_role|>")),
    ("glm47", ("</arg_key><arg_value>",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("[func_name1(", "tools")),
    ("llama3_json", ("<|start_header_id|>", "tool_calls", '"parameters"')),
    ("llama3_json", ("<|header_start|>", "tool_calls", '"parameters"')),
)
"""Texts that all occur in the templates of a format. The first match counts: later formats share marks of earlier
ones. Older templates of DeepSeek write calls and ignore tools."""
_NOT_HERMES = ("<function=", "<tool_calls>", "]<]minimax[>[")
"""Texts of other formats with a similar tag: arguments that are not JSON, a list of calls, and MiniMax-M3's tags."""
_REASONING_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai_gptoss", ("<|channel|>", "analysis")),
    ("mistral", ("[THINK]",)),
    ("gemma4", ("<|channel>thought",)),
    ("granite", ("Here is my thought process",)),
    ("seed_oss", ("<seed:think>",)),
    ("kimi_k2", ("</think>", "<|tool_calls_section_begin|>")),
    ("deepseek_r1", ("</think>", "<minimax:tool_call>")),
    ("deepseek_r1", ("</think>", _DEEPSEEK_TURN)),
)


def _find_format(template: str, marks: tuple[tuple[str, tuple[str, ...]], ...]) -> str | None:
    return next((name for name, texts in marks if all(text in template for text in texts)), None)


def _tool_format(template: str) -> str | None:
    """Return the tool format detected in a template."""
    found = _find_format(template, _TOOL_MARKS)
    if found == "hermes" and any(mark in template for mark in _NOT_HERMES):
        return None
    return found or ("hermes" if has_built_in_tools(template) else None)


def has_built_in_tools(template: str) -> bool:
    """Return True if a chat template ignores tools, so that the prompt of `with_built_in_tools` must describe them."""
    return bool(template) and "tools" not in template


def _reasoning_format(template: str, architecture: str) -> str | None:
    found = _find_format(template, _REASONING_MARKS)
    if found is not None or "</think>" not in template:
        return found
    return "deepseek_r1" if architecture.startswith("Deepseek") else "qwen3"
