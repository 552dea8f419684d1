"""Typed reading of one JSON object, in which every key is read, declared harmless or refused by name."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from jpaged.errors import InvalidArgument, Unsupported

MAX_INTEGER = 2**31 - 1
_MAX_NUMBER = sys.float_info.max
_MAX_SHOWN = 200


class JsonFields:
    """A JSON object that records which keys were read.

    A key whose value is null counts as absent, as in the transformers library. `finish` refuses every key that no code
    read, so that no setting that would change the output is ignored.

    Args:
        name: the object's name in errors: `config.json`, `config.json rope_scaling`.
    """

    def __init__(self, fields: Mapping[str, object], name: str) -> None:
        self._fields = fields
        self._name = name
        self._read: set[str] = set()

    @property
    def name(self) -> str:
        """Name of the object in errors."""
        return self._name

    def has(self, key: str) -> bool:
        """Return True if the key has a value other than null."""
        return self._fields.get(key) is not None

    def value(self, key: str, missing: object = None) -> object:
        """Return the raw value; `missing` if there is no such key, None if it holds null."""
        self._read.add(key)
        return self._fields.get(key, missing)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        """Read an integer from `minimum` to `maximum`; raise if it is absent and has no default."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.bad(key, f"is {_shown(value)}; it must be an integer of at least {minimum}")
        if value > maximum:
            raise self.bad(key, f"is {_shown(value)}; the limit is {maximum}")
        return value

    def number(self, key: str, default: float | None = None, *, is_signed: bool = False) -> float:
        """Read a finite number above 0, or any if `is_signed`; raise if it is absent and has no default."""
        value = self._required(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not abs(value) <= _MAX_NUMBER
            or not (is_signed or value > 0)
        ):
            raise self.bad(key, f"is {_shown(value)}; it must be a finite number{'' if is_signed else ' above 0'}")
        return float(value)

    def numbers(self, key: str, *, maximum: int) -> tuple[float, ...]:
        """Read a list of 1 to `maximum` finite numbers above 0; raise if it is absent."""
        values = self._required(key, None)
        if not isinstance(values, list) or not values or len(values) > maximum:
            raise self.bad(key, f"is {_shown(values)}; it must be a list of 1 to {maximum} numbers")
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_NUMBER:
                raise self.bad(key, f"has {_shown(value)}; it must be finite numbers above 0")
        return tuple(map(float, values))

    def texts(self, key: str, *allowed: str, count: int) -> tuple[str, ...]:
        """Read a list of `count` of the allowed words; empty if it is absent."""
        values = self.value(key)
        if values is None:
            return ()
        if not isinstance(values, list) or len(values) != count:
            raise self.bad(key, f"is {_shown(values)}; it must be a list of {count}")
        for value in values:
            if value not in allowed:
                raise Unsupported(f"{self._name}: {key} has {_shown(value)}; supported: {', '.join(allowed)}")
        return tuple(values)

    def flag(self, key: str, default: bool) -> bool:
        """Read a boolean."""
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, f"is {_shown(value)}; it must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Read a string; raise if it is absent and has no default."""
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self.bad(key, f"is {_shown(value)}; it must be a string")
        return value

    def mapping(self, key: str) -> Mapping[str, object]:
        """Read a nested object; empty if it is absent."""
        value = self._required(key, {})
        if not isinstance(value, Mapping):
            raise self.bad(key, f"is {_shown(value)}; it must be an object")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Read one token id or a list of them; empty if it is absent."""
        value = self.value(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id <= MAX_INTEGER:
                raise self.bad(key, f"is {_shown(value)}; it must be a token id or a list of token ids")
        return tuple(ids)

    def names(self, key: str) -> tuple[str, ...]:
        """Read a list of strings; empty if it is absent."""
        value = self.value(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.bad(key, f"is {_shown(value)}; it must be a list of strings")
        return tuple(value)

    def replaced(self, values: Mapping[str, object]) -> JsonFields:
        """Return the same object with other values of some keys; what is read of either is read of both."""
        made = JsonFields({**self._fields, **values}, self._name)
        self._read.update(values)
        made._read = self._read
        return made

    def ignore(self, keys: Iterable[str]) -> None:
        """Declare keys harmless: they change nothing in inference."""
        self._read.update(keys)

    def only(self, key: str, *allowed: object, why: str) -> None:
        """Accept a key that is absent or holds one of `allowed`, and refuse any other value."""
        value = self.value(key)
        if value is not None and not any(
            value is one or (type(value) is type(one) and value == one) for one in allowed
        ):
            raise Unsupported(f"{self._name}: {key} is {_shown(value)}; {why}")

    def unread(self) -> Mapping[str, object]:
        """Return the keys that were neither read nor ignored and are not null, in order."""
        return {key: self._fields[key] for key in sorted(self._fields) if key not in self._read and self.has(key)}

    def finish(self) -> None:
        """Refuse the keys that were neither read nor ignored, unless they are null."""
        unknown = self.unread()
        if unknown:
            listed = ", ".join(f"{key}={_shown(value)}" for key, value in unknown.items())
            raise Unsupported(
                f"{self._name}: unknown setting {listed}; it could change the output, so it is not ignored"
            )

    def bad(self, key: str, problem: str) -> InvalidArgument:
        """Return the error for one key; the caller raises it."""
        return InvalidArgument(f"{self._name} {key}", problem)

    def _required(self, key: str, default: object) -> object:
        self._read.add(key)
        value = self._fields.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.bad(key, "is missing")
        return default


def _shown(value: object) -> str:
    """Return the text of a value for an error, shortened."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
