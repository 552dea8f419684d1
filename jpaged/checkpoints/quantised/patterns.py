"""Module patterns of quantization configs -> rules of module names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from jpaged.errors import Unsupported
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.models.json_fields import JsonFields


def within(names: Sequence[str]) -> list[str]:
    """Return rules that match every module whose name contains one of these names, delimited by dots."""
    return [rf"(^|\.){re.escape(name)}(\.|$)" for name in names]


def rules_of(
    form: MatrixFormat, left: Sequence[str], own: Sequence[tuple[str, MatrixFormat | None]] = ()
) -> tuple[tuple[str, MatrixFormat | None], ...]:
    """Return the rules of a checkpoint with one format for its matrices, except those in `left` and `own`."""
    return (*((pattern, None) for pattern in left), *own, ("", form))


def from_start(expression: str) -> str:
    """Return the rule of an expression that must match at the start of a module's name.

    Raises:
        Unsupported: it is no regular expression.
    """
    flags = re.match(r"(\(\?[aiLmsux]+\))?", expression)
    assert flags is not None
    pattern = f"{flags[0]}^(?:{expression[flags.end() :]})"
    try:
        re.compile(pattern)
    except re.error as error:
        raise Unsupported(f"quantization_config: {expression!r} is not a regular expression: {error}") from error
    return pattern


def dynamic_rules(
    fields: JsonFields, read_form: Callable[[JsonFields], MatrixFormat]
) -> list[tuple[str, MatrixFormat | None]]:
    """Return the rules of GPTQModel's `dynamic`: unquantized modules (`-:`), and modules with other settings.

    Args:
        read_form: parses the format of a module's settings.

    Raises:
        Unsupported: a setting is not supported, or a pattern is no regular expression.
    """
    rules: list[tuple[str, MatrixFormat | None]] = []
    for name, given in fields.mapping("dynamic").items():
        if name.startswith("-:"):
            rules.append((from_start(name.removeprefix("-:")), None))
            continue
        if not isinstance(given, Mapping):
            raise fields.bad("dynamic", f"{name} is {given!r}; it must be an object")
        own = JsonFields(given, f"{fields.name} dynamic {name}")
        form = read_form(own)
        own.finish()
        rules.append((from_start(name.removeprefix("+:")), form))
    return rules
