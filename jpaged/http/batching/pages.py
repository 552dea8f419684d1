"""Paginated lists as in OpenAI's API: `limit` entries after the one named by `after`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from starlette.requests import Request

from jpaged.errors import InvalidArgument, NotFound


class Shown(Protocol):
    """An entry of a list."""

    @property
    def id(self) -> str: ...

    def shown(self) -> dict[str, Any]:
        """Return the entry in OpenAI's format."""


def page_of(values: Sequence[Shown], request: Request, *, max_limit: int, default: int) -> dict[str, Any]:
    """Return a page of values, by default the newest first.

    Raises:
        InvalidArgument: limit or order is invalid.
        NotFound: no entry has the id `after`.
    """
    given = request.query_params
    order, text, after = given.get("order", "desc"), given.get("limit", str(default)), given.get("after")
    if order not in ("asc", "desc"):
        raise InvalidArgument("order", f"{order[:80]!r} is neither 'asc' nor 'desc'")
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= max_limit):
        raise InvalidArgument("limit", f"{text[:80]!r} is not an integer from 1 to {max_limit}")
    ordered = list(reversed(values)) if order == "asc" else list(values)
    begin = 0
    if after is not None:
        begin = 1 + next((i for i, one in enumerate(ordered) if one.id == after), len(ordered))
        if begin > len(ordered):
            raise NotFound(f"after: there is no {after[:80]!r}")
    some = ordered[begin : begin + int(text)]
    return {
        "object": "list",
        "data": [one.shown() for one in some],
        "first_id": some[0].id if some else None,
        "last_id": some[-1].id if some else None,
        "has_more": begin + len(some) < len(ordered),
    }
