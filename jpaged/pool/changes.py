"""What blocks begin and cease to hold of cached prefixes, as it is told of step by step."""

from __future__ import annotations

from typing import Literal, NamedTuple

Tier = Literal["device", "host", "disk"]


class Owner(NamedTuple):
    """Whose prefix it is: what a root is made of, in the words of who asked."""

    salt: str = ""
    tenant: str = ""
    adapter_name: str = ""


class Stored(NamedTuple):
    """A tier holds a block from now on.

    Attributes:
        parent: the key of the block before it; None in front of a prompt, and where `token_ids` is empty.
        token_ids: of the block; empty below the device, where keys alone are known.
        owner: whose prefix it is, under which salt and adapter; None where token_ids is empty.
    """

    tier: Tier
    key: bytes
    kv_group: int
    parent: bytes | None = None
    token_ids: tuple[int, ...] = ()
    owner: Owner | None = None


class Removed(NamedTuple):
    """A tier does not hold it any more."""

    tier: Tier
    key: bytes
    kv_group: int


Change = Stored | Removed
