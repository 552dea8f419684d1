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
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from jpaged import json_text
from jpaged.chat import ChatOptions, Tool, ToolChoice, ToolChoiceMode
from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.service.chat.formats import AnswerFormat, ReasoningFormat, ToolFormat
from jpaged.service.chat.markup_parser import (
    CALL_ID,
    INDEX,
    ArgumentTypes,
    ListMarkup,
    ParameterTags,
    argument_types,
    resolve_reference,
)
from jpaged.service.chat.output_parser import ChatOutputParser
from jpaged.structured import MAX_GRAMMAR_BYTES, StructuredOutputs, TagTexts, ThinkingBudget
from jpaged.types import SamplingParams

Format = dict[str, Any]
_ANY_OBJECT = {"type": "object"}
_NEWLINES: Format = {"type": "regex", "pattern": r"[\r\n]{0,4}"}
_TEXT: Format = {"type": "regex", "pattern": "(?s:.*)"}
_ANY, _NO_END = "(?s:.*)", "(?:[^<]|<+[^/<])*"
"""Texts before an end that is a special token, and before an end tag such as `</parameter>`."""
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_GROUP = re.compile(r"\((?:\?:|(?!\?))")
_EMPTY: Format = {"type": "regex", "pattern": "()"}
_KEY: Format = {"type": "regex", "pattern": r"[^\s<>{}()\[\]\"'=,;|:]{1,64}"}
_NUMBER: Format = {"type": "regex", "pattern": "[0-9]{1,4}"}
_NO_LIST: Format = {"type": "regex", "pattern": r"([^\[\s](?s:.*))?"}
"""Text that does not begin like a list of calls."""
_PLACE = re.compile(f"{INDEX}|{re.escape(CALL_ID)}")
_ARRAY_LIMITS = frozenset({"minItems", "maxItems", "prefixItems", "uniqueItems", "contains"})
_MAX_DEPTH = 4
"""Depth from which literals are JSON."""
_MAX_STARTS = 32
"""Optional arguments up to which their order is that of the schema if none is required."""
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
    if tool_format.is_in_channels and tokens.are_in(tool_format.texts):
        body = _in_channels(schemas, tool_format, tokens, is_forced=is_forced)
    else:
        body = _calls(schemas, tool_format, tokens, is_forced=is_forced, is_one=is_one)
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
        pairs = ((number, at) for number, tool in enumerate(tools) for at in _places_of_schema(schema, tool.parameters))
        index, where = next(pairs, (None, ""))
        if index is None:
            raise InvalidArgument("tools", f"their grammar is invalid: {error.problem}") from error
        rest = told[place.end() :]
        if where:
            rest = where + rest if rest.startswith("/") else f"{where}: {rest.removeprefix(': ')}"
        problem = f"at {rest}" if rest.startswith("/") else rest.removeprefix(": ")
        raise InvalidArgument(f"tools[{index}].function.parameters", problem) from error


def _calls(
    schemas: Mapping[str, Any], tool_format: ToolFormat, tokens: SpecialTokens, *, is_forced: bool, is_one: bool
) -> list[Format]:
    """Return the formats of calls, and of the text before and between them unless they are forced."""
    is_in_tokens = tokens.are_in(tool_format.texts)
    begins = tool_format.begins[:1] if is_in_tokens else tool_format.begins
    calls = [_call(begin, name, schema, tool_format, tokens) for name, schema in schemas.items() for begin in begins]
    opener, closer = tool_format.section
    if not opener and not is_in_tokens and not is_forced and tool_format.triggers:
        return [_triggered(calls, tool_format, is_one=is_one)]
    if opener:
        section = [*tokens.parts(opener), _listed(calls, tool_format.separator, is_one=is_one), *tokens.parts(closer)]
        whole = [_sequence(section)]
    else:
        whole = _calls_alone(_or(calls), tool_format, is_one=is_one or not is_forced)
    if is_forced:
        return whole
    if not tool_format.triggers:
        return [_or([*whole, _NO_LIST])]
    if not is_in_tokens:
        inner = _listed(calls, tool_format.separator, is_one=is_one)
        return [_triggered([_tag(opener, inner, closer)], tool_format, is_one=is_one)]
    return [_TEXT, {"type": "optional" if is_one else "star", "content": _sequence(whole)}]


def _call(begin: str, name: str, schema: Mapping[str, Any], tool_format: ToolFormat, tokens: SpecialTokens) -> Format:
    """Return the format of one call.

    Args:
        begin: one of the format's `begins`.
    """
    if tool_format.arguments is None:
        arguments: list[Format] = [{"type": "json_schema", "json_schema": schema}]
    else:
        arguments = argument_formats(schema, tool_format.arguments, tokens)
    place = _PLACE.search(begin)
    head = (begin if place is None else begin[: place.start()]).replace("NAME", name)
    if place is not None:
        call_id = _sequence([*tokens.parts("[CALL_ID]"), {"type": "regex", "pattern": "[A-Za-z0-9]{9}"}])
        between = _NUMBER if place[0] == INDEX else {"type": "optional", "content": call_id}
        arguments = [between, *tokens.parts(begin[place.end() :]), *arguments]
    if tokens.are_in((head, tool_format.end)):
        return _sequence([*tokens.parts(head), *arguments, *tokens.parts(tool_format.end)])
    return _tag(head, _sequence(arguments), tool_format.end)


def _listed(calls: list[Format], separator: str, *, is_one: bool) -> Format:
    """Return the format of one or more calls."""
    if is_one:
        return _or(calls)
    if not separator:
        return {"type": "plus", "content": _or(calls)}
    tags = [call if call["type"] == "tag" else _tag("", call, "") for call in calls]
    return {"type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True}


def _triggered(tags: list[Format], tool_format: ToolFormat, *, is_one: bool) -> Format:
    ends = {"at_least_one": False, "stop_after_first": is_one}
    return {"type": "triggered_tags", "triggers": list(tool_format.triggers), "tags": tags, **ends}


def _calls_alone(call: Format, tool_format: ToolFormat, *, is_one: bool) -> list[Format]:
    """Return the format of an answer that consists of calls only."""
    if is_one:
        return [call]
    between: list[Format] = [{"type": "regex", "pattern": tool_format.between}] if tool_format.between else []
    return [{"type": "plus", "content": _sequence([call, *between])}]


def _in_channels(
    schemas: Mapping[str, Any], tool_format: ToolFormat, tokens: SpecialTokens, *, is_forced: bool
) -> list[Format]:
    """Return the formats of messages before a call, and of the call, which ends the answer."""
    begin = tool_format.begins[0]
    calls = _or([_call(begin, name, schema, tool_format, tokens) for name, schema in schemas.items()])
    first, last = tokens.parts("<|channel|>"), tokens.parts("<|message|>")
    next_message = tokens.parts("<|end|><|start|>assistant")
    before = {"type": "star", "content": _sequence([*first, _CHANNELS, *last, _TEXT, *next_message])}
    said = _sequence([*tokens.parts("<|channel|>final<|message|>"), _TEXT])
    return [before, calls if is_forced else _or([calls, said])]


_DEFINITIONS = ("$defs", "definitions")


def _with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a schema with the definitions of the whole, if it refers to any."""
    shared = {key: root[key] for key in _DEFINITIONS if key in root}
    return {**shared, **schema} if shared and '"$ref"' in json_text.dumps(schema) else dict(schema)


def _property_schemas(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the schemas of a tool's arguments by name, each with the definitions that it may refer to.

    Raises:
        InvalidArgument: the definitions are too large to be repeated so often.
    """
    root = resolve_reference(schema, schema)
    properties = root.get("properties") if isinstance(root, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    found = {key: _with_definitions(one, schema) for key, one in properties.items() if isinstance(one, Mapping)}
    num_definitions = sum(any(key in one for key in _DEFINITIONS) for one in found.values())
    num_bytes = num_definitions * len(json_text.dumps({key: schema[key] for key in _DEFINITIONS if key in schema}))
    if num_bytes > MAX_GRAMMAR_BYTES:
        problem = f"{num_bytes} bytes with the definitions of each argument, over the limit of {MAX_GRAMMAR_BYTES}"
        raise InvalidArgument("tools", f"their grammar is invalid: {problem}")
    return found


def _places_of_schema(schema: Any, parameters: Mapping[str, Any]) -> list[str]:
    """Return the places, as JSON pointers, where a schema of a grammar occurs in a tool's parameters."""
    properties = [f"/properties/{key}" for key, one in _property_schemas(parameters).items() if one == schema]
    return ["", *properties] if schema == dict(parameters) else properties


def argument_formats(
    schema: Mapping[str, Any], style: ParameterTags | ListMarkup, tokens: SpecialTokens
) -> list[Format]:
    """Return the formats of arguments that are not a JSON object.

    A schema without properties allows any arguments, if its additional properties are not false.
    """
    found = _property_schemas(schema)
    root = resolve_reference(schema, schema)
    is_free = not found and root.get("additionalProperties") is not False
    is_free = is_free and not ("properties" in root and "additionalProperties" not in root)
    required = root.get("required") if isinstance(root.get("required"), list) else []
    items = [(key in required, key, one) for key, one in found.items()]
    if isinstance(style, ParameterTags):
        return _tagged_arguments(items, style, tokens, schema, is_free=is_free)
    if is_free:
        value = _literal({}, style, tokens, schema)
        return [_separated([_sequence([_KEY, *tokens.parts(style.assign), *value])], "," if style.quote else ", ")]
    return _listed_arguments(items, style, tokens, schema)


_Items = Sequence[tuple[bool, str, Mapping[str, Any]]]
"""Arguments: if they are required, their names and their schemas."""


def _tagged_arguments(
    items: _Items, style: ParameterTags, tokens: SpecialTokens, root: Mapping[str, Any], *, is_free: bool
) -> list[Format]:
    def whole(key: list[Format], value: list[Format], key_end: str) -> Format:
        return _sequence([*tokens.parts(style.begin), *key, *tokens.parts(key_end + style.value_begin), *value])

    if is_free:
        free = whole([_KEY], _free_text(style.end, tokens), style.key_ends[0])
        return [{"type": "star", "content": free}]
    written = []
    for is_required, key, schema in items:
        types = argument_types(schema, root)
        is_text = "string" in types.names or (not types.names and len(style.key_ends) == 1)
        value = (
            _text_value(schema, types, style.end, tokens, root, is_string=len(style.key_ends) > 1)
            if is_text
            else [{"type": "json_schema", "json_schema": schema}, *tokens.parts(style.end)]
        )
        one = whole(tokens.parts(key), value, style.key_ends[0 if is_text else -1])
        written.append(one if is_required else {"type": "optional", "content": one})
    return written or [_EMPTY]


def _free_text(end: str, tokens: SpecialTokens) -> list[Format]:
    """Return the formats of text up to an end."""
    if tokens.are_in((end,)):
        return [_TEXT, *tokens.parts(end)]
    return [_tag("", {"type": "any_text"}, end)]


def _text_value(
    schema: Mapping[str, Any],
    types: ArgumentTypes,
    end: str,
    tokens: SpecialTokens,
    root: Mapping[str, Any],
    *,
    is_string: bool = False,
) -> list[Format]:
    """Return the formats of a string without quotes, and its end. Its length is bounded by the schema, if at all.

    Args:
        is_string: the text is a string whatever the schema, so values of other types cannot be written.
    """
    after = tokens.parts(end)
    values = [one for one in _listed_values(schema, root) if isinstance(one, str) or not is_string]
    schema = resolve_reference(schema, root)
    if values:
        texts = [one if isinstance(one, str) else json_text.dumps(one, ensure_ascii=False) for one in values]
        return [_or([_constant(text) for text in texts]), *after]
    pattern, low, high = schema.get("pattern"), schema.get("minLength"), schema.get("maxLength")
    if isinstance(pattern, str) and types.is_text:
        around = _ANY if tokens.are_in((end,)) else _NO_END if "</" in end else "[^<]*"
        return _matching_text(_search_pattern(pattern, around), end, tokens)
    if (low or high is not None) and types.is_text:
        return _matching_text(f"[^<]{{{low or 0},{'' if high is None else high}}}", end, tokens)
    return _free_text(end, tokens)


def _matching_text(pattern: str, end: str, tokens: SpecialTokens) -> list[Format]:
    text: Format = {"type": "regex", "pattern": pattern}
    return [text, *tokens.parts(end)] if tokens.are_in([end]) else [_tag("", text, end)]


def _search_pattern(pattern: str, around: str) -> str:
    """Return a regular expression of whole texts in which a schema's pattern occurs.

    An anchor belongs to one alternative: `^a|b$` is a text that starts with a or ends with b.

    Args:
        around: expression of the text before and after an alternative without an anchor.
    """
    return "|".join(_search_alternative(one, around) for one in _split_alternatives(pattern))


def _search_alternative(pattern: str, around: str) -> str:
    is_from_start, is_to_end = pattern.startswith("^"), _ends_with_anchor(pattern)
    inside = pattern[is_from_start : -1 if is_to_end else None]
    group = _GROUP.match(inside)
    if group and not (is_from_start or is_to_end) and _end_of_group(inside) == len(inside):
        return f"(?:{_search_pattern(inside[group.end() : -1], around)})"
    return f"{'' if is_from_start else around}(?:{inside or '()'}){'' if is_to_end else around}"


def _ends_with_anchor(pattern: str) -> bool:
    before = pattern.removesuffix("$")
    return before != pattern and (len(before) - len(before.rstrip("\\"))) % 2 == 0


def _split_alternatives(pattern: str) -> list[str]:
    """Return the alternatives of a regular expression, without those inside its groups."""
    found, begin, depth = [], 0, 0
    for place, part in _pieces(pattern):
        depth += {"(": 1, ")": -1}.get(part, 0)
        if part == "|" and depth == 0:
            found.append(pattern[begin:place])
            begin = place + 1
    return [*found, pattern[begin:]]


def _end_of_group(pattern: str) -> int:
    """Return the position after the group that starts a regular expression; 0 if the group has no end."""
    depth = 0
    for place, part in _pieces(pattern):
        depth += {"(": 1, ")": -1}.get(part, 0)
        if depth == 0:
            return place + 1
    return 0


def _pieces(pattern: str) -> Iterator[tuple[int, str]]:
    """Yield the position and text of each character, escape and character class."""
    return ((found.start(), found[0]) for found in _PIECE.finditer(pattern))


def _listed_values(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema lists, directly or in each alternative; empty if other values are allowed."""
    resolved = resolve_reference(schema, root)
    choices = next((resolved[key] for key in ("anyOf", "oneOf") if isinstance(resolved.get(key), list)), None)
    if choices is None or "const" in resolved or "enum" in resolved:
        return _own_values(resolved)
    found = [_own_values(one, has_null=True) for choice in choices if (one := resolve_reference(choice, root))]
    return [value for values in found for value in values] if len(found) == len(choices) and all(found) else []


def _own_values(schema: Any, *, has_null: bool = False) -> list[Any]:
    if not isinstance(schema, Mapping):
        return []
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum", [None] if has_null and schema.get("type") == "null" else None)
    return list(values) if isinstance(values, list) else []


def _constant(text: str) -> Format:
    return {"type": "const_string", "value": text} if text else _EMPTY


def _listed_arguments(
    items: _Items, style: ListMarkup, tokens: SpecialTokens, root: Mapping[str, Any], depth: int = 0
) -> list[Format]:
    """Return the formats of arguments between commas: the required ones, then the others.

    If none is required, the order is that of the schema, unless there are many or they are in another literal: then
    any order is possible.
    """
    comma = "," if style.quote else ", "
    written = [
        (is_required, _sequence([*tokens.parts(f"{key}{style.assign}"), *_literal(schema, style, tokens, root, depth)]))
        for is_required, key, schema in items
    ]
    required, optional = ([one for is_needed, one in written if is_needed == kind] for kind in (True, False))
    more = [{"type": "optional", "content": _sequence([*tokens.parts(comma), one])} for one in optional]
    if required:
        first = [part for one in required for part in (*tokens.parts(comma), one)][1:]
        return [*first, *more]
    if not optional:
        return [_EMPTY]
    if depth or len(optional) > _MAX_STARTS:
        return [_separated(optional, comma)]
    starts = [_sequence([one, *more[number + 1 :]]) for number, one in enumerate(optional)]
    return [{"type": "optional", "content": _or(starts)}]


def _literal(
    schema: Mapping[str, Any], style: ListMarkup, tokens: SpecialTokens, root: Mapping[str, Any], depth: int = 0
) -> list[Format]:
    """Return the formats of a literal. Values without a special form are JSON, which parsers accept too."""
    resolved = resolve_reference(schema, root)
    types = argument_types(schema, root)
    words = {} if style.quote else {True: "True", False: "False", None: "None"}
    values = _listed_values(schema, root)
    as_json: list[Format] = [{"type": "json_schema", "json_schema": _with_definitions(schema, root)}]
    if values and all(isinstance(one, str | bool | int | float | None) for one in values):
        return [_or([_sequence(_scalar(one, style, tokens, words)) for one in values])]
    if types.names and types.names <= {"boolean", "null"} and words:
        kinds = {"boolean": (True, False), "null": (None,)}
        return [_or([_constant(words[one]) for name in sorted(types.names) for one in kinds[name]])]
    if not style.quote or (depth and "$ref" in schema) or depth == _MAX_DEPTH:
        return as_json
    if not types.names or "string" in types.names:
        text = [*tokens.parts(style.quote), *_text_value(resolved, types, style.quote, tokens, root)]
        return text if types.is_text else [_or([_sequence(text), *as_json])]
    if types.names == {"array"} and not _ARRAY_LIMITS & resolved.keys() and isinstance(resolved.get("items"), Mapping):
        item = _literal(resolved["items"], style, tokens, root, depth + 1)
        return [_tag("[", _separated([_sequence(item)], ","), "]")]
    if types.names == {"object"} and isinstance(resolved.get("properties"), Mapping) and resolved["properties"]:
        required = resolved.get("required") or ()
        inner = [(key in required, key, one) for key, one in resolved["properties"].items() if isinstance(one, Mapping)]
        return [_tag("{", _sequence(_listed_arguments(inner, style, tokens, root, depth + 1)), "}")]
    return as_json


def _separated(items: Sequence[Format], separator: str) -> Format:
    """Return the format of any number of items in any order."""
    tags = [_tag("", one, "") for one in items]
    return {"type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": False}


def _scalar(value: Any, style: ListMarkup, tokens: SpecialTokens, words: Mapping[Any, str]) -> list[Format]:
    if isinstance(value, str) and style.quote:
        return [*tokens.parts(style.quote), *tokens.parts(value), *tokens.parts(style.quote)]
    is_word = (value is None or isinstance(value, bool)) and words
    return [_constant(words[value] if is_word else json_text.dumps(value, ensure_ascii=False))]


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
            self.check_budget("reasoning.thinking_token_budget", sampling)
            if sampling.thinking_token_budget is not None:
                problem = "conflicts with reasoning.thinking_token_budget: give only one of them"
                raise InvalidArgument("sampling.thinking_token_budget", problem)
        elif sampling.thinking_token_budget is not None:
            self.check_budget("thinking_token_budget", sampling)
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

    def thinking(
        self, options: ChatOptions | None, sampling: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> ThinkingBudget | None:
        """Return the thinking budget of an answer with the model's tags; None if unlimited.

        Args:
            options: of a chat. None for another prompt, in which thinking begins with the opening tag: tokens after it
                count, as in vLLM.
        """
        budget, reasoning = sampling.thinking_token_budget, self._format.reasoning
        if options is not None and budget is None:
            budget = options.reasoning.thinking_token_budget
        if budget is None or reasoning is None:
            return None
        opens, closes = (self._tag_ids(tag) for tag in (reasoning.open_tag, reasoning.close_tag))
        texts = TagTexts(
            reasoning.open_tag,
            reasoning.close_tag,
            lambda token_id: self._tokenizer.decode([token_id], skip_special_tokens=False),
        )
        if options is not None:
            is_open = self._is_open(prompt_token_ids)
        else:
            num_used = _num_thinking(prompt_token_ids, opens, closes)
            is_open, budget = num_used is not None, max(0, budget - (num_used or 0))
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
        schemas = {tool.name: tool.parameters for tool in options.shown_tools}
        return ChatOutputParser(
            lambda: self._format.parser(is_open=is_open, has_tools=has_tools, schemas=schemas),
            has_reasoning=options.reasoning.include,
            hidden_tokens=self._special_tokens if is_kept and sampling.skip_special_tokens else (),
            has_content=not (has_tools and options.choice.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)),
        )

    def check_budget(self, field: str, sampling: SamplingParams) -> None:
        """Reject a thinking budget that the server cannot enforce.

        Raises:
            InvalidArgument: beam search has none.
            Unsupported: the tags of this model are unknown.
        """
        if self._format.reasoning is None:
            raise Unsupported(f"{field}: the reasoning format of this model is unknown; set --reasoning-parser")
        if sampling.beam_width:
            raise InvalidArgument(field, "must be left out with sampling.beam_width")

    def _tag_ids(self, tag: str) -> list[int]:
        if isinstance(self._tokenizer, KnowsSpecialTokens):
            return self._tokenizer.tag_ids(tag)
        return self._tokenizer.encode(tag, add_special_tokens=False)

    def _is_open(self, prompt_token_ids: Sequence[int]) -> bool:
        tail = list(prompt_token_ids[-_NUM_TAIL_TOKENS:])
        return self._format.is_open(self._tokenizer.decode(tail, skip_special_tokens=False))


def _num_thinking(prompt_token_ids: Sequence[int], opens: Sequence[int], closes: Sequence[int]) -> int | None:
    """Return the number of tokens after the prompt's last opening tag; None if there is none, or it is closed."""
    packed = array("i", prompt_token_ids).tobytes()
    opened = _last_place(packed, opens)
    return None if opened <= _last_place(packed, closes) else len(prompt_token_ids) - opened - len(opens)


def _last_place(packed: bytes, tag: Sequence[int]) -> int:
    """Return the index of the last occurrence of a tag in packed token ids; -1 if there is none."""
    tokens = array("i", tag)
    wanted, at = tokens.tobytes(), len(packed)
    while tokens and (at := packed.rfind(wanted, 0, at + len(wanted) - 1)) >= 0:
        if at % tokens.itemsize == 0:
            return at // tokens.itemsize
    return -1


def _why_held(options: ChatOptions) -> str:
    mode = options.choice.mode
    if mode is not ToolChoiceMode.AUTO:
        return f"tool_choice {mode.value!r}"
    return "parallel_tool_calls of false" if not options.parallel_tool_calls else "a strict tool"
