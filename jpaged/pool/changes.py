"""KV cache events: cached prefix blocks that a memory tier stores or removes, published step by step."""

from __future__ import annotations

from typing import Literal, NamedTuple

Tier = Literal["device", "host", "disk"]


class Owner(NamedTuple):
    """Owner of a prefix: the inputs of the root block hash, as given by the client."""

    salt: str = ""
    tenant: str = ""
    adapter_name: str = ""


class Stored(NamedTuple):
    """A tier stores a block from now on.

    Attributes:
        parent: hash of the previous block; None for the first block of a prompt, and if `token_ids` is empty.
        token_ids: tokens of the block; empty below the device tier, where only hashes are known.
        owner: owner of the prefix; None if token_ids is empty.
    """

    tier: Tier
    key: bytes
    kv_group: int
    parent: bytes | None = None
    token_ids: tuple[int, ...] = ()
    owner: Owner | None = None


class Removed(NamedTuple):
    """A tier no longer stores a block."""

    tier: Tier
    key: bytes
    kv_group: int


Change = Stored | Removed
