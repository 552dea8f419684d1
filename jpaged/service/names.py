"""What a caller may call something: a request, a tenant, a prefix, an adapter."""

from __future__ import annotations

import re

from jpaged.errors import InvalidArgument
from jpaged.types import MAX_CACHE_SALT_CHARS

_NAME = re.compile(r"[\x20-\x7e]{1,128}")


def is_name(name: str) -> bool:
    """Whether something may be called so."""
    return _NAME.fullmatch(name) is not None


def require_name(field: str, name: str) -> None:
    """Refuse a name that cannot be an id, a tenant, a prefix's or an adapter's."""
    if not is_name(name):
        raise InvalidArgument(field, f"{name!r} is not 1 to 128 printable ASCII characters")


def told_name(name: str) -> str:
    """Return what logs and the audit are told of a name that was not looked up yet; "" where nothing can have it."""
    return name if is_name(name) else ""


def require_salt(salt: str) -> None:
    """Refuse a cache salt that is too long."""
    if len(salt) > MAX_CACHE_SALT_CHARS:
        raise InvalidArgument("cache_salt", f"{len(salt)} characters; at most {MAX_CACHE_SALT_CHARS}")
