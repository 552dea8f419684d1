"""KV cache events as MessagePack messages, in the format of vLLM (distributed/kv_events.py) since June 2026.

    [time, [event, ...], data_parallel_rank]

    {"type": "BlockStored", "block_hashes": [u64, ...], "parent_block_hash": u64 | nil, "token_ids": [...],
     "block_size": B, "lora_id": nil, "medium": "GPU" | "CPU" | "DISK", "lora_name": str | nil, "extra_keys": [...],
     "group_idx": g, "kv_cache_spec_kind": "full_attention" | "sliding_window", "kv_cache_spec_sliding_window": W | nil,
     "kv_cache_spec_sink_tokens": M}
    {"type": "BlockRemoved", "block_hashes": [...], "medium": ..., "group_idx": g}
    {"type": "AllBlocksCleared"}

A hash is the first 64 bits of a block's key. Consecutive blocks are one event with the tokens of all. If a tier below
the device stores a block, only its key is known and token_ids is empty, as in vLLM's offloading: subscribers know the
hash. `extra_keys` has, for each block, what the hash depends on in addition to tokens: the adapter name, and for the
first block the salt and the tenant. `kv_cache_spec_sink_tokens` is an extension, present only if the first M tokens are
visible in addition to a window. vLLM's readers ignore it, like other unknown names. Older vLLM readers expect events as
arrays in the same order, which is the other encoding and cannot contain the extension. Unknown names are ignored when
reading, so that later versions are understood.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgpack

from jpaged.errors import InvalidArgument
from jpaged.pool import Change, PrefixOwner, Removed, Stored, Tier

Encoding = Literal["map", "array"]
MEDIA: dict[Tier, str] = {"device": "GPU", "host": "CPU", "disk": "DISK", "external": "EXTERNAL"}
_TIERS: dict[str, Tier] = {medium: tier for tier, medium in MEDIA.items()}
_TENANT = "tenant"
_SINKS = "kv_cache_spec_sink_tokens"
_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
MAX_MESSAGE_BYTES = 256 << 20
"""Maximum size of a message: a block has at most 1024 tokens, and a pool some hundred thousand blocks."""

_MAX_TOKEN = (1 << 32) - 1


def to_hash(key: bytes) -> int:
    """Return the hash of a block in messages: 64 bits of the key."""
    return int.from_bytes(key[:8], "big")


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encoder of the messages of one replica.

    Attributes:
        block_size: B.
        windows: window of each KV group; None for full attention.
        num_sink_tokens: leading tokens that groups with a window attend to in addition.
        encoding: "map" is vLLM's current format, "array" the previous one.
    """

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    rank: int = 0
    encoding: Encoding = "map"
    num_sink_tokens: int = 0

    def encode(self, changes: Sequence[Change], time_s: float) -> bytes:
        """Return the message of a step.

        Args:
            time_s: seconds since the epoch.
        """
        events = [self._written(event) for event in self._events(changes)]
        message: bytes = msgpack.packb([time_s, events, self.rank])
        return message

    def cleared(self, time_s: float) -> bytes:
        """Return the message that all blocks were removed."""
        message: bytes = msgpack.packb([time_s, [self._written({"type": "AllBlocksCleared"})], self.rank])
        return message

    def _events(self, changes: Sequence[Change]) -> Iterator[dict[str, Any]]:
        event: dict[str, Any] | None = None
        last: Change | None = None
        for change in changes:
            if event is not None and last is not None and _goes_on(last, change):
                event["block_hashes"].append(to_hash(change.key))
                if isinstance(change, Stored):
                    event["token_ids"] += change.token_ids
                    event["extra_keys"].append(_extra_keys(change))
            else:
                if event is not None:
                    yield event
                event = self._begun(change)
            last = change
        if event is not None:
            yield event

    def _begun(self, change: Change) -> dict[str, Any]:
        event: dict[str, Any] = {"block_hashes": [to_hash(change.key)], "medium": MEDIA[change.tier]}
        if len(self.windows) > 1:
            event["group_idx"] = change.kv_group
        if isinstance(change, Removed):
            return {"type": "BlockRemoved", **event}
        window = self.windows[change.kv_group]
        return {
            "type": "BlockStored",
            **event,
            "parent_block_hash": None if change.parent is None else to_hash(change.parent),
            "token_ids": list(change.token_ids),
            "block_size": self.block_size,
            "lora_id": None,
            "lora_name": change.owner.adapter_name or None if change.owner else None,
            "extra_keys": [_extra_keys(change)],
            "kv_cache_spec_kind": "full_attention" if window is None else "sliding_window",
            **({} if window is None else {"kv_cache_spec_sliding_window": window}),
            **({_SINKS: self.num_sink_tokens} if window is not None and self.num_sink_tokens else {}),
        }

    def _written(self, event: dict[str, Any]) -> dict[str, Any] | list[Any]:
        if self.encoding == "map":
            return event
        values = [event.get(name) for name in _FIELDS[event["type"]]]
        while values and values[-1] is None:  # like msgspec, which omits trailing defaults
            values.pop()
        return [event["type"], *values]


def _goes_on(last: Change, change: Change) -> bool:
    """Return True if a change joins the event of the one before it."""
    if type(last) is not type(change) or last.tier != change.tier or last.kv_group != change.kv_group:
        return False
    if isinstance(last, Removed) or isinstance(change, Removed):
        return True
    if not change.token_ids:
        return not last.token_ids
    return change.parent == last.key and change.owner == last.owner and bool(last.token_ids)


def _extra_keys(stored: Stored) -> list[Any] | None:
    """Return what the hash of a block depends on, except its tokens and its parent."""
    owner = stored.owner
    if owner is None:
        return None
    is_first = stored.parent is None
    keys: list[Any] = [owner.adapter_name] if owner.adapter_name else []
    if owner.salt and is_first:
        keys.append(owner.salt)
    if owner.tenant and is_first:
        keys.append([_TENANT, owner.tenant])
    return keys or None


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Consecutive blocks that a tier now stores.

    Attributes:
        hashes: hash of each block.
        parent: hash before the first block; None at the start of a prompt.
        token_ids: tokens of all blocks, block_size of each; empty if not published.
        owner: owner of the first block if it starts a prompt; else only the adapter is known.
        window: tokens that the KV group attends to, which does not need blocks before them; None for all.
        num_sink_tokens: leading tokens that it attends to in addition.
    """

    tier: Tier
    hashes: tuple[int, ...]
    parent: int | None
    token_ids: tuple[int, ...]
    block_size: int
    owner: PrefixOwner
    kv_group: int
    window: int | None = None
    num_sink_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RemovedBlocks:
    """Blocks that a tier no longer stores; the tier is None for all tiers."""

    tier: Tier | None
    hashes: tuple[int, ...]
    kv_group: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """Removal of all blocks."""


Event = StoredBlocks | RemovedBlocks | Cleared


def decode(message: bytes) -> tuple[list[Event], int]:
    """Return the events of a message in either encoding, and the data-parallel rank of the sender.

    Unknown kinds of events, tiers and fields are ignored.

    Raises:
        InvalidArgument: the message is not a batch of KV cache events, or too long.
    """
    if len(message) > MAX_MESSAGE_BYTES:
        raise InvalidArgument("message", f"{len(message)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    try:
        found = msgpack.unpackb(message, strict_map_key=False)
        _, events, *rest = found
        rank = rest[0] if rest and rest[0] is not None else 0
        return [event for one in events if (event := _read(_named(one))) is not None], int(rank)
    except InvalidArgument:
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError, msgpack.UnpackException) as error:
        raise InvalidArgument("message", f"is not a batch of KV events: {error}") from error


def _named(event: Any) -> dict[str, Any]:
    """Return the fields of an event by name, for either encoding."""
    if isinstance(event, dict):
        return event
    kind, *values = event
    return {"type": kind, **dict(zip(_FIELDS.get(kind, ()), values, strict=False))}


def _read(event: dict[str, Any]) -> Event | None:
    kind = event["type"]
    if kind == "AllBlocksCleared":
        return Cleared()
    medium = event.get("medium")
    tier = "device" if medium is None else _TIERS.get(str(medium).upper())
    if kind not in ("BlockStored", "BlockRemoved") or tier is None:
        return None
    hashes = tuple(_number(one) for one in event["block_hashes"])
    kv_group = int(event.get("group_idx") or 0)
    if kind == "BlockRemoved":
        return RemovedBlocks(None if medium is None else tier, hashes, kv_group)
    parent, token_ids, block_size = event["parent_block_hash"], tuple(event["token_ids"]), int(event["block_size"])
    if token_ids and (len(token_ids) != block_size * len(hashes) or not all(map(_is_token, token_ids))):
        raise InvalidArgument(
            "token_ids",
            f"{len(token_ids)} for {len(hashes)} blocks of {block_size}; each must be from 0 to {_MAX_TOKEN}",
        )
    parent = None if parent is None else _number(parent)
    window = event.get("kv_cache_spec_sliding_window")
    window = None if window is None else int(window)
    num_sink_tokens = max(0, int(event.get(_SINKS) or 0))
    return StoredBlocks(tier, hashes, parent, token_ids, block_size, _owner(event), kv_group, window, num_sink_tokens)


def _owner(event: dict[str, Any]) -> PrefixOwner:
    """Return the owner from the first block's extra keys: adapter name, then salt, then tenant."""
    adapter = str(event.get("lora_name") or "")
    keys = list((event.get("extra_keys") or [None])[0] or ())
    if adapter and keys and keys[0] == adapter:
        del keys[0]
    salt = next((one for one in keys if isinstance(one, str)), "")
    pairs = [one for one in keys if isinstance(one, list | tuple) and len(one) == 2]
    return PrefixOwner(salt, next((str(name) for kind, name in pairs if kind == _TENANT), ""), adapter)


def _is_token(found: Any) -> bool:
    return type(found) is int and 0 <= found <= _MAX_TOKEN


def _number(found: Any) -> int:
    """Return a hash as an unsigned number; some publishers send bytes or signed numbers."""
    if isinstance(found, bytes):
        return int.from_bytes(found[:8], "big")
    if type(found) is not int:
        raise InvalidArgument("block_hashes", f"{found!r} is neither a number nor bytes")
    return found % (1 << 64)
