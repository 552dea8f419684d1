"""Who holds how much of a prompt, as servers tell it. No I/O; one thread writes and asks.

    events of a server      hash of theirs ──> key of ours      by the chain of tokens that they tell
    a prompt                its chain of keys ──> of each server the blocks that it has from the front

A key of ours is a digest of the tokens of a block, of the key before it, and of salt, tenant and adapter's name in
front: what a router has without a tokenizer of its own, if requests bring token ids. So servers whose own keys differ
(other adapters' numbers, other hash functions, vLLM) are in one directory. What a server holds in several tiers counts
until it is gone from all of them. Of models with several KV groups the first counts, which has no window where any has
none; where all have, the blocks count that whoever goes on behind a prompt sees, for no other is needed: those of the
window, and where first tokens are kept besides, theirs.

What is told of blocks that nobody knows the tokens of is passed over: a directory may say too little, which costs a
hit, and where messages were lost too much, which costs one as well. Of a prompt so many blocks are looked for and no
more, however long it is and however small the blocks are that servers tell of: who asks does not wait for long.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from jpaged.kvevents.encoding import Cleared, Event, RemovedBlocks, StoredBlocks
from jpaged.pool import Owner, Tier

Key = bytes
Tokens = Sequence[int] | NDArray[np.integer]
_KEY_BYTES = 16
_TOKEN_BYTES = 8
_FIRST_PART = 8
"""Blocks of a prompt that are looked for at first; then twice as many each time."""
_MAX_KEYS = 4096
"""Keys that are made for one question, some milliseconds; servers of several block sizes share them."""
NOBODY = Owner()
"""No salt, no tenant and no adapter."""


@dataclass(slots=True)
class _Held:
    """What one server holds.

    Attributes:
        window: tokens that a query sees; None is all.
        num_sink_tokens: those at the beginning that it sees besides.
        keys: our key of each hash of theirs.
        hashes: theirs of each key of ours.
        tiers: where each hash is.
    """

    block_size: int | None = None
    window: int | None = None
    num_sink_tokens: int = 0
    keys: dict[int, Key] = field(default_factory=dict)
    hashes: dict[Key, int] = field(default_factory=dict)
    tiers: dict[int, set[Tier]] = field(default_factory=dict)


class Directory:
    """Which servers hold the beginning of a prompt.

    Args:
        max_blocks: of one server; what it tells beyond is passed over.
    """

    def __init__(self, max_blocks: int = 4_000_000) -> None:
        self._max_blocks = max_blocks
        self._servers: dict[str, _Held] = {}

    @property
    def servers(self) -> tuple[str, ...]:
        """Those that told something, and were not forgotten."""
        return tuple(self._servers)

    def num_blocks(self, server: str) -> int:
        """Blocks that a server is known to hold, in whatever tier."""
        held = self._servers.get(server)
        return 0 if held is None else len(held.tiers)

    def take(self, server: str, events: Iterable[Event]) -> None:
        """Takes what a server tells, in order."""
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
        """A server is gone, or what it told was lost: nothing is known of it."""
        self._servers.pop(server, None)

    def num_tokens_held(
        self, token_ids: Tokens, owner: Owner = NOBODY, servers: Iterable[str] | None = None
    ) -> Mapping[str, int]:
        """Tokens from the front of a prompt that each server holds; those that hold none are left out.

        Behind the first `_MAX_KEYS` blocks nothing is looked for; where servers have blocks of k sizes, a k-th of that.

        Args:
            servers: who is asked about; None is all.
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
        if not event.token_ids:  # a tier beneath, which tells hashes alone
            for one in event.hashes:
                if one in held.keys:
                    held.tiers[one].add(event.tier)
            return
        if held.block_size is None:
            held.block_size, held.window = event.block_size, event.window
            held.num_sink_tokens = event.num_sink_tokens
        parent = root_of(event.owner) if event.parent is None else held.keys.get(event.parent)
        if parent is None or event.block_size != held.block_size:
            return
        for place, one in enumerate(event.hashes):
            tokens = event.token_ids[place * event.block_size : (place + 1) * event.block_size]
            parent = key_of(parent, tokens)
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
    """A hash of theirs has no key of ours any more, or gets another: the tokens that it had are not held by it."""
    key = held.keys.pop(one, None)
    if key is not None and held.hashes.get(key) == one:
        del held.hashes[key]


def root_of(owner: Owner) -> Key:
    """The key in front of a prompt."""
    found = hashlib.blake2b(digest_size=_KEY_BYTES)
    for name in owner:
        encoded = name.encode()
        found.update(len(encoded).to_bytes(4, "big") + encoded)
    return found.digest()


def key_of(parent: Key, token_ids: Tokens) -> Key:
    """The key of a block behind `parent`."""
    return _key_of_bytes(parent, np.asarray(token_ids, np.int64).tobytes())


def _key_of_bytes(parent: Key, tokens: bytes) -> Key:
    return hashlib.blake2b(parent + tokens, digest_size=_KEY_BYTES).digest()


class _Chain:
    """The keys of a prompt's blocks, made as far as somebody asks and there are to be; tokens are of 8 bytes."""

    def __init__(self, block_size: int, tokens: bytes, owner: Owner, max_blocks: int) -> None:
        self._block_bytes = block_size * _TOKEN_BYTES
        self._tokens = tokens
        self.num_blocks = min(len(tokens) // self._block_bytes, max_blocks)
        self._keys: list[Key] = []
        self._last = root_of(owner)

    def part(self, begin: int, end: int) -> list[Key]:
        """The keys of some blocks."""
        for place in range(len(self._keys), end):
            tokens = self._tokens[place * self._block_bytes : (place + 1) * self._block_bytes]
            self._last = _key_of_bytes(self._last, tokens)
            self._keys.append(self._last)
        return self._keys[begin:end]


def _num_held(held: _Held, chain: _Chain) -> int:
    """The most blocks of a prompt behind which a server can go on."""
    if held.window is None:
        return _num_in_front(held.hashes, chain, chain.num_blocks)
    block_size = held.block_size or 1
    num_sinks, num_seen = -(-held.num_sink_tokens // block_size), -(-(held.window - 1) // block_size)
    num_in_front = _num_in_front(held.hashes, chain, min(num_sinks, chain.num_blocks))
    if num_in_front < num_sinks:  # whoever goes on behind a block that is missing there would need it
        return num_in_front
    return _num_seen_held(held.hashes, chain, max(1, num_seen))


def _num_in_front(hashes: Mapping[Key, int], chain: _Chain, most: int) -> int:
    """Blocks from the front without a gap, of the first so many."""
    num_blocks, width, holds = 0, _FIRST_PART, hashes.__contains__
    while num_blocks < most:
        part = chain.part(num_blocks, min(num_blocks + width, most))
        if not all(map(holds, part)):  # a loop of ours takes five times as long, for each of many servers
            return num_blocks + [*map(holds, part)].index(False)
        num_blocks, width = num_blocks + len(part), 2 * width
    return num_blocks


def _num_seen_held(hashes: Mapping[Key, int], chain: _Chain, num_seen: int) -> int:
    """The most blocks of which the last so many are held, or all where they are fewer."""
    runs = bytes(map(hashes.__contains__, chain.part(0, chain.num_blocks))).split(b"\0")
    end = chain.num_blocks
    for run in reversed(runs):
        if len(run) >= num_seen:
            return end
        end -= len(run) + 1
    return len(runs[0])
