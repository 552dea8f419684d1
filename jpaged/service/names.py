"""Validity of names that callers choose: for requests, tenants, prefixes and adapters."""

from __future__ import annotations

import re

from jpaged.errors import InvalidArgument
from jpaged.types import MAX_CACHE_SALT_CHARS

_NAME = re.compile(r"[\x20-\x7e]{1,128}")


def is_name(name: str) -> bool:
    """Return True if the name is valid."""
    return _NAME.fullmatch(name) is not None


def require_name(field: str, name: str) -> None:
    """Reject an invalid name."""
    if not is_name(name):
        raise InvalidArgument(field, f"{name!r} is not 1 to 128 printable ASCII characters")


def told_name(name: str) -> str:
    """Return a name for logs and the audit before it is looked up; "" if it is invalid."""
    return name if is_name(name) else ""


def require_salt(salt: str) -> None:
    """Reject a cache salt that is too long."""
    if len(salt) > MAX_CACHE_SALT_CHARS:
        raise InvalidArgument("cache_salt", f"{len(salt)} characters; at most {MAX_CACHE_SALT_CHARS}")
