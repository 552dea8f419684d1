"""What configs call modules -> the rules that find their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from jpaged.errors import Unsupported
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.models.json_fields import JsonFields


def within(names: Sequence[str]) -> list[str]:
    """The rules of names that stand for each module whose name they are a part of, at its dots."""
    return [rf"(^|\.){re.escape(name)}(\.|$)" for name in names]


def rules_of(
    form: MatrixFormat, left: Sequence[str], own: Sequence[tuple[str, MatrixFormat | None]] = ()
) -> tuple[tuple[str, MatrixFormat | None], ...]:
    """The rules of a checkpoint with one format for its matrices, except those left and those with a rule of `own`."""
    return (*((pattern, None) for pattern in left), *own, ("", form))


def from_start(expression: str) -> str:
    """The rule of an expression that must be found where a module's name begins.

    Raises:
        Unsupported: it is no regular expression.
    """
    flags = re.match(r"(\(\?[aiLmsux]+\))?", expression)
    assert flags is not None
    pattern = f"{flags[0]}^(?:{expression[flags.end() :]})"
    try:
        re.compile(pattern)
    except re.error as error:
        raise Unsupported(f"quantization_config: {expression!r} is no regular expression: {error}") from error
    return pattern


def dynamic_rules(
    fields: JsonFields, read_form: Callable[[JsonFields], MatrixFormat]
) -> list[tuple[str, MatrixFormat | None]]:
    """Return the rules of GPTQModel's `dynamic`: modules that it leaves (`-:`), and modules with other settings.

    Args:
        read_form: the format that a module's own settings describe.

    Raises:
        Unsupported: a setting that is not computed, or what is no regular expression.
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
