r"""rank_pattern and alpha_pattern: regular expressions of module names, each with a number.

As in PEFT, the first pattern counts that matches the end of a name, from a dot on: `(.*\.)?(pattern)$`.

Python's engine tries every way in which a name may match while it holds the interpreter lock: `(a+)+b` would stop the
server. So the number of ways is bounded before matching. A repeat counts as 32 ways, because repeats share the letters
of a name, an optional part as 2, and alternatives as their number. A repeated group multiplies ways beyond that, and is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from jpaged.errors import InvalidArgument

NumberT = TypeVar("NumberT", int, float)

MAX_NAME_LEN = 200
"""Maximum characters of a tensor's name; PEFT's have up to about 110."""

_WAYS_OF_REPEAT = 32
_MAX_WAYS = 1 << 24
"""Limit of the ways, at which the longest name takes 0.1 s.

Measured with `.*.*.*x`, and with `.?` 18 times, which has 2^24 ways with the prefix that PEFT adds.
"""

_MAX_SHOWN = 200
_LETTER = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_OTHER_GROUP = re.compile(r"\(\?[^:=!<P]")
_CHOICE = re.compile(r"\((?:\?[:=!<P])?|\)|\||(?:[*+?]|\{[\d,]*\})[?+]?")


@dataclass(frozen=True, slots=True)
class Patterns(Generic[NumberT]):
    """Compiled regular expressions of module names, each with a number."""

    compiled: tuple[tuple[re.Pattern[str], NumberT], ...]

    @classmethod
    def checked(cls, numbers: Mapping[str, NumberT], field: str) -> Patterns[NumberT]:
        """Compile the patterns of a field.

        Raises:
            InvalidArgument: a pattern is no regular expression, or they may try a name in too many ways; it is named.
        """
        compiled, num_ways = [], 0
        for pattern, number in numbers.items():
            expression = rf"(.*\.)?({pattern})$"
            shown = f"{pattern!r:.{_MAX_SHOWN}}"
            try:
                compiled.append((re.compile(expression), number))
            except (re.error, OverflowError, RecursionError) as error:
                problem = f"{shown} is not a regular expression in PEFT's form, (.*\\.)?(...)$: {error}"
                raise InvalidArgument(field, problem) from error
            plain = _LETTER.sub("x", expression)
            for kind, what in ((_REPEATED_GROUP, "repeats a group"), (_OTHER_GROUP, "has a special group")):
                if kind.search(plain):
                    raise InvalidArgument(
                        field, f"{shown} {what}, which may take unlimited time: rewrite it without that"
                    )
            num_ways += _num_ways(plain)
            if num_ways > _MAX_WAYS:
                raise InvalidArgument(
                    field,
                    f"{shown} and those before it may match a name in {num_ways} ways; the limit is {_MAX_WAYS}: use "
                    "fewer repeats, optional parts and alternatives",
                )
        return cls(tuple(compiled))

    def of(self, module: str, default: NumberT) -> NumberT:
        """Return the number of the first pattern that a module's name matches, or the default."""
        return next((number for pattern, number in self.compiled if pattern.match(module)), default)


def _num_ways(expression: str) -> int:
    """Return a bound of the ways to match a name, for an expression without escapes, classes or repeated groups."""
    num_ways, alternatives = 1, [1]
    for choice in _CHOICE.findall(expression):
        if choice.startswith("("):
            alternatives.append(1)
        elif choice == ")":
            num_ways *= alternatives.pop()
        elif choice == "|":
            alternatives[-1] += 1
        else:
            num_ways *= 2 if choice.startswith("?") else _WAYS_OF_REPEAT
    return num_ways * alternatives.pop()
