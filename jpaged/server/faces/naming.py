"""Translation of field names in errors to those of the caller's message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jpaged.errors import InvalidArgument

SAMPLING = "sampling."
"""Prefix of the fields in errors of `SamplingParams`."""


@contextmanager
def naming(name: Callable[[str], str]) -> Iterator[None]:
    """Rename the field of an InvalidArgument raised inside, by `name`."""
    try:
        yield
    except InvalidArgument as error:
        if (field := name(error.field)) == error.field:
            raise
        raise type(error)(field, error.problem) from error
