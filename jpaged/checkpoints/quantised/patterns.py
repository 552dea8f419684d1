"""What configs call modules -> the rules that find their names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jpaged.errors import Unsupported
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.models.json_fields import JsonFields


def within(names: Sequence[str]) -> list[str]:
    """The rules of names that stand for each module whose name they are a part of, at its dots."""
    return [rf"(^|\.){re.escape(name)}(\.|$)" for name in names]


def rules_of(form: MatrixFormat, left: Sequence[str]) -> tuple[tuple[str, MatrixFormat | None], ...]:
    """The rules of a checkpoint that has one format for all matrices but those that are left."""
    return (*((pattern, None) for pattern in left), ("", form))


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


def left_by_dynamic(fields: JsonFields) -> list[str]:
    """The rules of the modules that GPTQModel's `dynamic` leaves.

    Raises:
        Unsupported: it gives modules settings of their own.
    """
    given = fields.mapping("dynamic")
    other = next((name for name in given if not name.startswith("-:")), None)
    if other is not None:
        raise Unsupported(
            f"{fields.name}: dynamic has {other!r}; modules that it leaves (-:) are read, none with other settings"
        )
    return [from_start(name.removeprefix("-:")) for name in given]
