r"""Constraints and parsers of one model's chat answers, chosen by the model's format.

A structural tag forces a family's tool-call format. It is plain data, from which a grammar is built:

    {"type": "structural_tag",
     "format": {"type": "sequence", "elements": [
         {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"},
         {"type": "regex", "pattern": "[\\r\\n]*"},
         {"type": "triggered_tags",
          "triggers": ["<tool_call>"],
          "tags": [
              {"type": "tag",
               "begin": "<tool_call>\n{\"name\": \"f\", \"arguments\": ",
               "content": {"type": "json_schema", "json_schema": {...}},
               "end": "}\n</tool_call>"}],
          "at_least_one": true,
          "stop_after_first": false}]}}

Text is free up to a trigger, which must continue as one of the tags that start with it. `stop_after_first` allows
nothing after the first tag. If a call is required, the last part consists of calls only: one, or several with the
family's separator between them, and no text. The parts before it are the free reasoning; without reasoning, `format` is
the last part alone.

A grammar does not treat special tokens as text. If the family's tags are such tokens, they are `token`s by id, and free
text is a regular expression, which matches none of them.
Source: https://xgrammar.mlc.ai/docs/xgrammar_features/structural_tag.html.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from jpaged.chat import ChatOptions, Tool, ToolChoice, ToolChoiceMode
from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.service.chat.formats import AnswerFormat, ReasoningFormat, ToolFormat
from jpaged.service.chat.output_parser import ChatOutputParser
from jpaged.structured import StructuredOutputs, TagTexts, ThinkingBudget
from jpaged.types import SamplingParams

Format = dict[str, Any]
_ANY_OBJECT = {"type": "object"}
_NEWLINES: Format = {"type": "regex", "pattern": r"[\r\n]{0,4}"}
_TEXT: Format = {"type": "regex", "pattern": "(?s:.*)"}
_CHANNELS: Format = {"type": "regex", "pattern": "analysis|commentary"}
_SCHEMA_PLACE = re.compile(r" at ((?:/[a-z0-9_]+)*/json_schema)(?=[/:])")
"""Matches the path of a tag's schema in an error."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens of a tokenizer: text -> id. Grammars omit those in `ending`: a grammar ends without them."""

    ids: Mapping[str, int] = field(default_factory=dict)
    ending: frozenset[int] = frozenset()

    def are_in(self, texts: Iterable[str]) -> bool:
        """Return True if one of the texts contains a special token."""
        return any(token in text for text in texts for token in self.ids)

    def parts(self, text: str) -> list[Format]:
        """Split a text into formats: special tokens, and the text between them."""
        by_length = sorted(self.ids, key=len, reverse=True)
        found = re.split(f"({'|'.join(map(re.escape, by_length))})", text) if by_length else [text]
        return [
            {"type": "token", "token": self.ids[part]} if part in self.ids else {"type": "const_string", "value": part}
            for part in found
            if part and self.ids.get(part) not in self.ending
        ]


def structural_tag_for(
    tools: Sequence[Tool],
    choice: ToolChoice,
    answer_format: AnswerFormat,
    *,
    is_parallel: bool = True,
    is_open: bool = False,
    tokens: SpecialTokens | None = None,
) -> Format | None:
    """Return the constraint of an answer, or None if it is free.

    With `tool_choice` "auto" an answer is constrained only if a tool is strict or only one call is allowed. A call must
    then be of one of the tools, and the arguments of strict tools must follow their schemas.

    Args:
        choice: as `parse_tool_choice` reads it.
        answer_format: the format of a model that writes calls.
        is_parallel: several calls may be made; a named function is called once.
        is_open: the answer begins inside its reasoning.
        tokens: special tokens that may be in the family's tags; None for none.
    """
    tool_format, reasoning = answer_format.tools, answer_format.reasoning
    if choice.mode is ToolChoiceMode.NONE or tool_format is None:
        return None
    is_forced = choice.mode is not ToolChoiceMode.AUTO
    if not is_forced and is_parallel and not any(tool.is_strict for tool in tools):
        return None
    is_named = choice.mode is ToolChoiceMode.NAMED
    callable_tools = [tool for tool in tools if not is_named or tool.name == choice.name]
    schemas = {
        tool.name: dict(tool.parameters) if is_forced or tool.is_strict else dict(_ANY_OBJECT)
        for tool in callable_tools
    }
    is_one = is_named or not is_parallel
    tokens = tokens or SpecialTokens()
    if tokens.are_in((*tool_format.begins, tool_format.end)):
        body = _in_tokens(schemas, tool_format, tokens, is_forced=is_forced, is_one=is_one)
    else:
        body = [_in_text(schemas, tool_format, is_forced=is_forced, is_one=is_one)]
    thought = [] if reasoning is None or reasoning.is_whole_answer else _thought(reasoning, tokens, is_open=is_open)
    return {"type": "structural_tag", "format": _sequence([*thought, *body])}


@contextmanager
def naming_tools(tag: str, tools: Sequence[Tool]) -> Iterator[None]:
    """Translate errors about a tag built from tools into errors about the tools that the caller sent.

    Args:
        tag: as JSON.

    Raises:
        InvalidArgument: raised inside; renamed to `tools`, or to the tool whose schema is invalid.
    """
    try:
        yield
    except InvalidArgument as error:
        if "structural_tag" not in error.field:
            raise
        place = _SCHEMA_PLACE.search(told := str(error))
        if place is None:
            raise InvalidArgument("tools", f"their grammar is invalid: {error.problem}") from error
        schema: Any = json.loads(tag)
        for key in place[1].split("/")[1:]:
            schema = schema[int(key) if isinstance(schema, list) else key]
        index = next(number for number, tool in enumerate(tools) if dict(tool.parameters) == schema)
        rest = told[place.end() :]
        problem = f"at {rest}" if rest.startswith("/") else rest.removeprefix(": ")
        raise InvalidArgument(f"tools[{index}].function.parameters", problem) from error


def _in_text(schemas: Mapping[str, Any], tool_format: ToolFormat, *, is_forced: bool, is_one: bool) -> Format:
    tags = [
        _tag(begin.replace("NAME", name), {"type": "json_schema", "json_schema": schema}, tool_format.end)
        for name, schema in schemas.items()
        for begin in tool_format.begins
    ]
    if is_forced:
        return _sequence(_calls_alone(_or(tags), tool_format, is_one=is_one))
    triggers = list(tool_format.triggers)
    ends = {"at_least_one": False, "stop_after_first": is_one}
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, **ends}


def _calls_alone(call: Format, tool_format: ToolFormat, *, is_one: bool) -> list[Format]:
    """Return the format of an answer that consists of calls only."""
    if is_one:
        return [call]
    between: list[Format] = [{"type": "regex", "pattern": tool_format.between}] if tool_format.between else []
    return [{"type": "plus", "content": _sequence([call, *between])}]


def _in_tokens(
    schemas: Mapping[str, Any], tool_format: ToolFormat, tokens: SpecialTokens, *, is_forced: bool, is_one: bool
) -> list[Format]:
    end = tokens.parts(tool_format.end)
    usual = tool_format.begins[0]
    calls = _or(
        [
            _sequence(
                [*tokens.parts(usual.replace("NAME", name)), {"type": "json_schema", "json_schema": schema}, *end]
            )
            for name, schema in schemas.items()
        ]
    )
    if tool_format.is_in_channels:
        first, last = tokens.parts("<|channel|>"), tokens.parts("<|message|>")
        next_message = tokens.parts("<|end|><|start|>assistant")
        before = {"type": "star", "content": _sequence([*first, _CHANNELS, *last, _TEXT, *next_message])}
        said = _sequence([*tokens.parts("<|channel|>final<|message|>"), _TEXT])
        return [before, calls if is_forced else _or([calls, said])]
    if is_forced:
        return _calls_alone(calls, tool_format, is_one=is_one)
    return [_TEXT, {"type": "optional" if is_one else "star", "content": calls}]


def _thought(reasoning: ReasoningFormat, tokens: SpecialTokens, *, is_open: bool) -> list[Format]:
    """Return the formats of the reasoning and the line ends after it."""
    if tokens.are_in((reasoning.open_tag, reasoning.close_tag)):
        begin = [] if is_open else tokens.parts(reasoning.open_tag)
        whole = [*begin, _TEXT, *tokens.parts(reasoning.close_tag), _NEWLINES]
    else:
        begin_text = "" if is_open else reasoning.open_tag
        whole = [_tag(begin_text, {"type": "any_text"}, reasoning.close_tag), _NEWLINES]
    return whole if is_open else [{"type": "optional", "content": _sequence(whole)}]


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _sequence(elements: Sequence[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


def _or(elements: Sequence[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


_NUM_TAIL_TOKENS = 16
"""Tokens at a prompt's end that are decoded to see if it opens or closes reasoning; a tag may take several tokens."""


@runtime_checkable
class KnowsSpecialTokens(Protocol):
    """Tokenizer that exposes the special tokens that `decode` leaves out."""

    @property
    def special_tokens(self) -> frozenset[str]: ...

    def tag_ids(self, tag: str) -> list[int]: ...


class ChatOutputConfig:
    """Constraints and parsers of a model's chat answers. Thread-safe.

    Args:
        answer_format: how the model writes reasoning and calls; None if unknown.
        eos_token_ids: every token that ends an answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        answer_format: AnswerFormat | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._format = answer_format or AnswerFormat()
        self._special_tokens: frozenset[str] = frozenset()
        self._tag_tokens = SpecialTokens()
        if isinstance(tokenizer, KnowsSpecialTokens):
            self._special_tokens = frozenset(token for token in tokenizer.special_tokens if token)
            ids = {token: tokenizer.tag_ids(token) for token in self._special_tokens if self._format.has_tag(token)}
            of_one = {token: found[0] for token, found in ids.items() if len(found) == 1}
            self._tag_tokens = SpecialTokens(of_one, eos_token_ids)

    def check(self, options: ChatOptions, sampling: SamplingParams) -> None:
        """Reject options that no answer of this model can satisfy. Cheap.

        Raises:
            InvalidArgument: a field of `sampling` conflicts with the options.
            Unsupported: the server does not know this model's format, or cannot enforce the options.
        """
        if options.reasoning.thinking_token_budget is not None:
            self._check_budget(sampling)
        if not options.reasoning.include and self._format.reasoning is None:
            raise Unsupported(
                "reasoning.include: the reasoning format of this model is unknown, so it cannot be left out; set "
                "--reasoning-parser"
            )
        if not options.shown_tools:
            return
        if self._format.tools is None:
            raise Unsupported(
                "tools: the tool call format of this model is unknown; set --tool-call-parser, or use "
                "tool_choice 'none'"
            )
        if not sampling.detokenize:
            raise InvalidArgument("sampling.detokenize", "must be true with tools: calls are read from the text")

    def held(self, options: ChatOptions, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> SamplingParams:
        """Return sampling parameters that keep the answer parseable and constrain its calls to the tools.

        Raises:
            InvalidArgument: the text has another constraint already, or the tools exceed the limits of a grammar.
        """
        has_tools = bool(options.shown_tools)
        if self._format.needs_special_tokens(self._special_tokens, has_tools=has_tools):
            sampling = replace(sampling, skip_special_tokens=False)
        if not has_tools or self._format.tools is None:
            return sampling
        tag = structural_tag_for(
            options.shown_tools,
            options.choice,
            self._format,
            is_parallel=options.parallel_tool_calls,
            is_open=self._is_open(prompt_token_ids),
            tokens=self._tag_tokens,
        )
        if tag is None:
            return sampling
        given = sampling.structured_outputs
        if given is not None and given.has_constraint:
            what = _why_held(options)
            raise InvalidArgument(
                "sampling.structured_outputs", f"conflicts with {what}, which also requires a grammar"
            )
        try:
            held = StructuredOutputs(structural_tag=tag).with_options(given)
            return replace(sampling, structured_outputs=held)
        except InvalidArgument as error:
            raise InvalidArgument("tools", f"their grammar is invalid: {error.problem}") from error

    def thinking(self, options: ChatOptions, prompt_token_ids: Sequence[int]) -> ThinkingBudget | None:
        """Return the thinking budget of an answer with the model's tags; None if unlimited."""
        budget, reasoning = options.reasoning.thinking_token_budget, self._format.reasoning
        if budget is None or reasoning is None:
            return None
        opens, closes = (self._tag_ids(tag) for tag in (reasoning.open_tag, reasoning.close_tag))
        texts = TagTexts(
            reasoning.open_tag,
            reasoning.close_tag,
            lambda token_id: self._tokenizer.decode([token_id], skip_special_tokens=False),
        )
        is_open = self._is_open(prompt_token_ids)
        return ThinkingBudget(opens, closes, budget, is_open_at_start=is_open, texts=texts)

    def answers(
        self, options: ChatOptions, sampling: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> ChatOutputParser | None:
        """Return the parser of the answers to a chat; None if all text is content.

        Args:
            sampling: the parameters as the caller sent them.
        """
        has_tools = bool(options.shown_tools)
        parts = (self._format.tools if has_tools else None, self._format.reasoning)
        if not sampling.detokenize or parts == (None, None):
            return None
        is_open = self._is_open(prompt_token_ids)
        is_kept = self._format.needs_special_tokens(self._special_tokens, has_tools=has_tools)
        names = [tool.name for tool in options.shown_tools]
        return ChatOutputParser(
            lambda: self._format.parser(is_open=is_open, has_tools=has_tools, tool_names=names),
            has_reasoning=options.reasoning.include,
            hidden_tokens=self._special_tokens if is_kept and sampling.skip_special_tokens else (),
            has_content=not (has_tools and options.choice.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)),
        )

    def _check_budget(self, sampling: SamplingParams) -> None:
        if self._format.reasoning is None:
            raise Unsupported(
                "reasoning.thinking_token_budget: the reasoning format of this model is unknown; set --reasoning-parser"
            )
        if sampling.beam_width:
            raise InvalidArgument("reasoning.thinking_token_budget", "must be left out with sampling.beam_width")

    def _tag_ids(self, tag: str) -> list[int]:
        if isinstance(self._tokenizer, KnowsSpecialTokens):
            return self._tokenizer.tag_ids(tag)
        return self._tokenizer.encode(tag, add_special_tokens=False)

    def _is_open(self, prompt_token_ids: Sequence[int]) -> bool:
        tail = list(prompt_token_ids[-_NUM_TAIL_TOKENS:])
        return self._format.is_open(self._tokenizer.decode(tail, skip_special_tokens=False))


def _why_held(options: ChatOptions) -> str:
    mode = options.choice.mode
    if mode is not ToolChoiceMode.AUTO:
        return f"tool_choice {mode.value!r}"
    return "parallel_tool_calls of false" if not options.parallel_tool_calls else "a strict tool"
