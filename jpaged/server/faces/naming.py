"""Errors that name the fields of the message that a caller has sent, and not ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jpaged.errors import InvalidArgument

SAMPLING = "sampling."
"""How errors of `SamplingParams` begin their fields."""


@contextmanager
def naming(name: Callable[[str], str]) -> Iterator[None]:
    """Inside, the field of an InvalidArgument becomes what `name` makes of it."""
    try:
        yield
    except InvalidArgument as error:
        if (field := name(error.field)) == error.field:
            raise
        raise type(error)(field, error.problem) from error
