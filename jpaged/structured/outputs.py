"""A constraint on the generated text.

Names and meanings are those of vLLM's `StructuredOutputsParams`
(https://docs.vllm.ai/en/latest/features/structured_outputs.html), plus `always_complete`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from jpaged import json_text
from jpaged.errors import InvalidArgument

MAX_GRAMMAR_BYTES = 512 << 10
"""Maximum bytes of a schema, a grammar, a pattern, or of all choices together."""
MAX_CHOICES = 4096
MAX_PATTERN_CHARS = 1024
"""Maximum characters of `whitespace_pattern`."""
FIELD = "sampling.structured_outputs"
JSON_WHITESPACE = r"[ ]|\r?\n[ \t]{0,20}"
"""Default whitespace between parts of JSON: allows compact, spaced and indented texts, but no unbounded run.

llama.cpp has the same bound. Without one, models write whitespace until `max_tokens` (xgrammar's issue 412).
"""


class ConstraintKind(enum.Enum):
    """Kind of a constraint: the field's name."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    JSON_OBJECT = "json_object"
    STRUCTURAL_TAG = "structural_tag"


_OF_JSON = (ConstraintKind.JSON, ConstraintKind.JSON_OBJECT, ConstraintKind.STRUCTURAL_TAG)
_OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties", "always_complete")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """One constraint on the generated text, and options. A value out of range raises `InvalidArgument`.

    Set at most one constraint. Options without a constraint apply to that of a `response_format` or of tools. A schema
    or a structural tag may be given as text or as the parsed value; it is kept as text in the caller's order, which is
    the order of an object's properties.

    Attributes:
        json: a JSON schema.
        regex: a regular expression for the whole text.
        choice: the texts to choose from.
        grammar: a grammar in EBNF (with `::=`) or Lark.
        json_object: True allows any JSON object.
        structural_tag: free text with constrained parts, as JSON.
        whitespace_pattern: a regular expression of the whitespace between parts of JSON; None for the server's default,
            which is JSON_WHITESPACE unless configured.
        disable_any_whitespace: no whitespace between parts of JSON.
        disable_additional_properties: objects whose schema names properties allow no others, unless the schema sets
            additionalProperties.
        always_complete: the text is complete even if `max_tokens` is reached: when few tokens are left, only tokens
            after which it can be finished in time are allowed.
    """

    json: str | bool | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    always_complete: bool = False

    def __post_init__(self) -> None:
        self._check_flags()
        kinds = [
            kind
            for kind in ConstraintKind
            if getattr(self, kind.value) not in (None, False) or self._is_schema_false(kind)
        ]
        names = ", ".join(kind.value for kind in ConstraintKind)
        if len(kinds) > 1 or not (kinds or self._has_options):
            found = " and ".join(kind.value for kind in kinds) or "none"
            raise InvalidArgument(FIELD, f"has {found}: must have exactly one of {names}")
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                object.__setattr__(self, name, _written(name, value))
        for name in ("json", "regex", "grammar", "structural_tag", "whitespace_pattern"):
            _check_text(name, getattr(self, name))
        if self.choice is not None:
            self._check_choice(self.choice)
            object.__setattr__(self, "choice", tuple(self.choice))
        self._check_whitespace(kinds[0] if kinds else None)

    @property
    def has_constraint(self) -> bool:
        """False if there are only options."""
        return any(getattr(self, kind.value) not in (None, False) for kind in ConstraintKind)

    def with_options(self, options: StructuredOutputs | None) -> StructuredOutputs:
        """Return this constraint with the options of another value.

        Raises:
            InvalidArgument: the other value has a constraint too, or an option does not fit this one.
        """
        if options is None:
            return self
        if options.has_constraint:
            raise InvalidArgument(
                FIELD, f"has {options.kind.value}: must have only options, because there is another constraint"
            )
        return replace(self, **{name: getattr(options, name) for name in _OPTIONS})

    @property
    def _has_options(self) -> bool:
        return self.whitespace_pattern is not None or any(getattr(self, name) for name in _OPTIONS[1:])

    @property
    def kind(self) -> ConstraintKind:
        return next(kind for kind in ConstraintKind if getattr(self, kind.value) not in (None, False))

    @property
    def field(self) -> str:
        """Name of the constraint in errors."""
        return f"{FIELD}.{self.kind.value}"

    def _is_schema_false(self, kind: ConstraintKind) -> bool:
        return kind is ConstraintKind.JSON and self.json is False

    def _check_flags(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in ("disable_any_whitespace", "disable_additional_properties", "always_complete"):
                is_ok = isinstance(value, bool)
            elif one.name == "json_object":
                is_ok = value is None or isinstance(value, bool)
            else:
                continue
            if not is_ok:
                raise InvalidArgument(f"{FIELD}.{one.name}", f"{value!r} must be true or false")

    def _check_choice(self, choice: Sequence[str]) -> None:
        name = f"{FIELD}.choice"
        is_list = isinstance(choice, Sequence) and not isinstance(choice, str)
        if not is_list or not 1 <= len(choice) <= MAX_CHOICES:
            what = f"{len(choice)} strings" if is_list else f"{type(choice).__name__}"
            raise InvalidArgument(name, f"{what}: must be a list of 1 to {MAX_CHOICES} strings")
        for index, text in enumerate(choice):
            if not isinstance(text, str) or not text:
                raise InvalidArgument(f"{name}[{index}]", f"{text!r} must be a non-empty string")
            _check_text(f"choice[{index}]", text)
        if (total := sum(len(text.encode()) for text in choice)) > MAX_GRAMMAR_BYTES:
            raise InvalidArgument(name, f"{total} bytes in all, over the limit of {MAX_GRAMMAR_BYTES}")

    def _check_whitespace(self, kind: ConstraintKind | None) -> None:
        for name in ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
            if getattr(self, name) and kind is not None and kind not in _OF_JSON:
                raise InvalidArgument(f"{FIELD}.{name}", f"applies only to JSON, not to {kind.value}")
        if self.whitespace_pattern is None:
            return
        if self.disable_any_whitespace:
            raise InvalidArgument(f"{FIELD}.whitespace_pattern", "must be left out with disable_any_whitespace")
        if len(self.whitespace_pattern) > MAX_PATTERN_CHARS:
            found = len(self.whitespace_pattern)
            raise InvalidArgument(
                f"{FIELD}.whitespace_pattern", f"{found} characters, over the limit of {MAX_PATTERN_CHARS}"
            )


def get_structured_outputs(given: Mapping[str, Any]) -> StructuredOutputs | None:
    """Return the constraint of a JSON object, by field names; None if no field is set.

    Fields that are null, and flags that are false, count as unset: clients send all fields with their defaults.

    Raises:
        InvalidArgument: it has an unknown field, or a value out of range.
    """
    names = [one.name for one in fields(StructuredOutputs)]
    for name in given:
        if name not in names:
            raise InvalidArgument(f"{FIELD}.{name}", f"is unknown: must be one of {', '.join(names)}")
    is_set = any(value is not None and (value is not False or name == "json") for name, value in given.items())
    return StructuredOutputs(**given) if is_set else None


def get_response_format(given: object, field: str) -> StructuredOutputs | None:
    """Return the constraint of OpenAI's `response_format`; None for text.

    Args:
        field: name of the field in errors.

    Raises:
        InvalidArgument: it is none of text, json_object, json_schema and structural_tag.
    """
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or kind not in ("text", "json_object", "json_schema", "structural_tag"):
        problem = f"{given!r} is not an object whose type is text, json_object, json_schema or structural_tag"
        raise InvalidArgument(field, problem)
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind == "structural_tag":
        return StructuredOutputs(structural_tag=given)
    schema = given.get("json_schema")
    if not isinstance(schema, Mapping) or not isinstance(schema.get("schema"), Mapping):
        raise InvalidArgument(f"{field}.json_schema", "must be an object whose schema is an object")
    unknown = schema.keys() - {"name", "description", "schema", "strict"}
    if unknown:
        raise InvalidArgument(f"{field}.json_schema.{min(unknown)}", "is unknown")
    return StructuredOutputs(json=schema["schema"])


def _written(name: str, value: Any) -> str:
    try:
        return json_text.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{FIELD}.{name}", f"is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidArgument(f"{FIELD}.{name}", "is nested too deeply") from error


def _check_text(name: str, text: object) -> None:
    if text is None:
        return
    if not isinstance(text, str):
        raise InvalidArgument(f"{FIELD}.{name}", f"must be a string, not {type(text).__name__}")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        what = f"is not UTF-8: {text[error.start]!a} at character {error.start}"
        raise InvalidArgument(f"{FIELD}.{name}", what) from error
    may_be_blank = name in ("regex", "whitespace_pattern") or name.startswith("choice")
    if not (text if may_be_blank else text.strip()) and name != "whitespace_pattern":
        raise InvalidArgument(f"{FIELD}.{name}", "is empty")
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidArgument(f"{FIELD}.{name}", f"{num_bytes} bytes, over the limit of {MAX_GRAMMAR_BYTES}")
