"""Index of how much of a prompt each server caches, from KV cache events. No I/O; used by one thread.

    events of a server      server's block hash ──> our key      by the chain of tokens in the events
    a prompt                its chain of keys ──> of each server the leading blocks that it caches

Our key is a digest of the tokens of a block, of the previous key, and initially of salt, tenant and adapter name. A
router can compute it without a tokenizer if requests contain token ids. So servers with different block hashes (other
adapter numbers, other hash functions, vLLM) share one index. A block stored in several tiers counts until it is removed
from all of them. For models with several KV groups only the first is indexed, which has no window if any group has
none. If all have windows, only the blocks visible after a prompt must be cached: those of the window, and attention
sinks.

Events without known tokens are ignored. The index may therefore report too little, or too much after lost messages;
both cost only a cache hit. The number of blocks looked up per prompt is limited, whatever its length and the servers'
block sizes, which bounds the time of a lookup.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from jpaged.kvevents.encoding import Cleared, Event, RemovedBlocks, StoredBlocks
from jpaged.pool import PrefixOwner, Tier

Key = bytes
Tokens = Sequence[int] | NDArray[np.integer]
_KEY_BYTES = 16
_TOKEN_BYTES = 8
_FIRST_PART = 8
"""Blocks of a prompt that are looked up first; the number doubles each time."""
_MAX_KEYS = 4096
"""Maximum number of keys computed per lookup, some milliseconds; divided among the servers' block sizes."""
NOBODY = PrefixOwner()
"""No salt, no tenant and no adapter."""


@dataclass(slots=True)
class _Held:
    """Blocks that one server caches.

    Attributes:
        window: tokens that a query attends to; None for all.
        num_sink_tokens: leading tokens that it attends to in addition.
        keys: our key of each of the server's hashes.
        hashes: the server's hash of each of our keys.
        tiers: tiers that store each hash.
    """

    block_size: int | None = None
    window: int | None = None
    num_sink_tokens: int = 0
    keys: dict[int, Key] = field(default_factory=dict)
    hashes: dict[Key, int] = field(default_factory=dict)
    tiers: dict[int, set[Tier]] = field(default_factory=dict)


class Directory:
    """Index of the servers that cache the beginning of a prompt.

    Args:
        max_blocks: maximum number of blocks per server; events beyond it are ignored.
    """

    def __init__(self, max_blocks: int = 4_000_000) -> None:
        self._max_blocks = max_blocks
        self._servers: dict[str, _Held] = {}

    @property
    def servers(self) -> tuple[str, ...]:
        """Return the servers that published events and were not forgotten."""
        return tuple(self._servers)

    def num_blocks(self, server: str) -> int:
        """Return the number of blocks that a server caches, in any tier."""
        held = self._servers.get(server)
        return 0 if held is None else len(held.tiers)

    def take(self, server: str, events: Iterable[Event]) -> None:
        """Apply the events of a server, in order."""
        held = self._servers.setdefault(server, _Held())
        for event in events:
            if isinstance(event, Cleared):
                self._servers[server] = held = _Held()
            elif event.kv_group:
                continue
            elif isinstance(event, RemovedBlocks):
                self._remove(held, event)
            else:
                self._store(held, event)

    def forget(self, server: str) -> None:
        """Remove a server that is gone, or whose events were lost."""
        self._servers.pop(server, None)

    def num_tokens_held(
        self, token_ids: Tokens, owner: PrefixOwner = NOBODY, servers: Iterable[str] | None = None
    ) -> Mapping[str, int]:
        """Return the number of leading tokens of a prompt that each server caches, without servers that cache none.

        At most `_MAX_KEYS` blocks are looked up; if servers have k block sizes, a k-th of that each.

        Args:
            servers: servers to look up; None for all.
        """
        asked = [
            (server, held, held.block_size)
            for server in (self._servers if servers is None else servers)
            if (held := self._servers.get(server)) is not None and held.block_size is not None
        ]
        sizes = {block_size for *_, block_size in asked}
        longest = max(sizes, default=0) * _MAX_KEYS
        prompt = np.asarray(token_ids[:longest], np.int64).tobytes()
        chains = {size: _Chain(size, prompt, owner, _MAX_KEYS // len(sizes)) for size in sizes}
        found: dict[str, int] = {}
        for server, held, block_size in asked:
            num_blocks = _num_held(held, chains[block_size])
            if num_blocks:
                found[server] = num_blocks * block_size
        return found

    def _store(self, held: _Held, event: StoredBlocks) -> None:
        if not event.token_ids:  # a lower tier, which publishes only hashes
            for one in event.hashes:
                if one in held.keys:
                    held.tiers[one].add(event.tier)
            return
        if held.block_size is None:
            held.block_size, held.window = event.block_size, event.window
            held.num_sink_tokens = event.num_sink_tokens
        parent = get_root(event.owner) if event.parent is None else held.keys.get(event.parent)
        if parent is None or event.block_size != held.block_size:
            return
        for place, one in enumerate(event.hashes):
            tokens = event.token_ids[place * event.block_size : (place + 1) * event.block_size]
            parent = get_key(parent, tokens)
            if one not in held.keys and len(held.keys) >= self._max_blocks:
                return
            _forget_key(held, one)
            held.keys[one] = parent
            held.hashes[parent] = one
            held.tiers.setdefault(one, set()).add(event.tier)

    def _remove(self, held: _Held, event: RemovedBlocks) -> None:
        for one in event.hashes:
            tiers = held.tiers.get(one)
            if tiers is None:
                continue
            tiers.clear() if event.tier is None else tiers.discard(event.tier)
            if not tiers:
                del held.tiers[one]
                _forget_key(held, one)


def _forget_key(held: _Held, one: int) -> None:
    """Remove the key of a server's hash, whose tokens have changed or are gone."""
    key = held.keys.pop(one, None)
    if key is not None and held.hashes.get(key) == one:
        del held.hashes[key]


def get_root(owner: PrefixOwner) -> Key:
    """Return the parent key of a prompt's first block."""
    found = hashlib.blake2b(digest_size=_KEY_BYTES)
    for name in owner:
        encoded = name.encode()
        found.update(len(encoded).to_bytes(4, "big") + encoded)
    return found.digest()


def get_key(parent: Key, token_ids: Tokens) -> Key:
    """Return the key of a block that follows `parent`."""
    return _key_of_bytes(parent, np.asarray(token_ids, np.int64).tobytes())


def _key_of_bytes(parent: Key, tokens: bytes) -> Key:
    return hashlib.blake2b(parent + tokens, digest_size=_KEY_BYTES).digest()


class _Chain:
    """Keys of a prompt's blocks, computed on demand up to a limit; `tokens` has 8 bytes per token."""

    def __init__(self, block_size: int, tokens: bytes, owner: PrefixOwner, max_blocks: int) -> None:
        self._block_bytes = block_size * _TOKEN_BYTES
        self._tokens = tokens
        self.num_blocks = min(len(tokens) // self._block_bytes, max_blocks)
        self._keys: list[Key] = []
        self._last = get_root(owner)

    def part(self, begin: int, end: int) -> list[Key]:
        """Return the keys of the blocks `begin` to `end`."""
        for place in range(len(self._keys), end):
            tokens = self._tokens[place * self._block_bytes : (place + 1) * self._block_bytes]
            self._last = _key_of_bytes(self._last, tokens)
            self._keys.append(self._last)
        return self._keys[begin:end]


def _num_held(held: _Held, chain: _Chain) -> int:
    """Return the largest number of leading blocks of a prompt that a server can reuse."""
    if held.window is None:
        return _num_in_front(held.hashes, chain, chain.num_blocks)
    block_size = held.block_size or 1
    num_sinks, num_seen = -(-held.num_sink_tokens // block_size), -(-(held.window - 1) // block_size)
    num_in_front = _num_in_front(held.hashes, chain, min(num_sinks, chain.num_blocks))
    if num_in_front < num_sinks:  # a request that reuses blocks after the missing one would need it
        return num_in_front
    return _num_seen_held(held.hashes, chain, max(1, num_seen))


def _num_in_front(hashes: Mapping[Key, int], chain: _Chain, most: int) -> int:
    """Return the number of leading cached blocks without a gap, up to `most`."""
    num_blocks, width, holds = 0, _FIRST_PART, hashes.__contains__
    while num_blocks < most:
        part = chain.part(num_blocks, min(num_blocks + width, most))
        if not all(map(holds, part)):  # a Python loop takes five times as long, for each of many servers
            return num_blocks + [*map(holds, part)].index(False)
        num_blocks, width = num_blocks + len(part), 2 * width
    return num_blocks


def _num_seen_held(hashes: Mapping[Key, int], chain: _Chain, num_seen: int) -> int:
    """Return the largest number of blocks of which the last num_seen, or all if fewer, are cached."""
    runs = bytes(map(hashes.__contains__, chain.part(0, chain.num_blocks))).split(b"\0")
    end = chain.num_blocks
    for run in reversed(runs):
        if len(run) >= num_seen:
            return end
        end -= len(run) + 1
    return len(runs[0])
