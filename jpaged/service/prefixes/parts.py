"""Messages of a prefix transfer: a header, then pieces of blocks, in order within a block.

    header   the tokens, and what the bytes depend on
    piece    [key] contents ... contents [hash]     the key is in a block's first piece, the hash in its last

Block keys in messages are those of the tokens after a root without a tenant; each server adds the tenant itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jpaged.engine.kv.blocks import Key
from jpaged.engine.kv.tiers.leaving import Leaving, Place

MAX_PIECES_BYTES = 256 << 10
"""Limit of a message's contents, including the overhead of each piece."""
MAX_MESSAGE_BYTES = 257 << 10
"""Limit of a whole message."""
_PIECE_BYTES = 96
"""Approximate overhead of a piece."""
MAX_PIECES = MAX_PIECES_BYTES // _PIECE_BYTES + 1
"""Maximum pieces of a message, reached if each holds one byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Header of a transfer; see PrefixHeader in prefixes.proto."""

    kv_identity: bytes
    facts: tuple[tuple[str, str], ...]
    block_size: int
    bytes_per_block: int
    num_kv_groups: int
    token_ids: tuple[int, ...]
    num_found_tokens: int
    num_blocks: int
    cache_salt: str = ""
    adapter: str = ""
    adapter_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a block, or all of it; see PrefixPiece in prefixes.proto."""

    index: int
    kv_group: int
    offset: int
    contents: bytes
    key: bytes = b""
    hash: bytes = b""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Result of an import; see PrefixArrival in prefixes.proto."""

    num_tokens: int
    num_found_tokens: int
    num_loaded_blocks: int
    num_known_blocks: int
    is_short_of_room: bool = False


def hash_begin(key: Key, kv_group: int) -> hashlib._Hash:
    """Return the hash state of a block before any contents are added."""
    return hashlib.sha256(key + kv_group.to_bytes(4, "little"))


def cut(leaving: Leaving, part: int, keys: Sequence[Key]) -> list[list[Piece]]:
    """Return the messages of a part that is in host memory. Call on a thread, see `Leaving.read`."""
    cutter = Cutter(keys)
    leaving.read(part, cutter.add)
    return list(cutter.messages())


class Cutter:
    """Cuts blocks into messages of pieces, on a thread.

    Args:
        keys: keys of the blocks, as sent in messages.
    """

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = keys
        self._messages: list[list[Piece]] = [[]]
        self._room = MAX_PIECES_BYTES

    def add(self, place: Place, contents: memoryview) -> None:
        """Copy a block into messages."""
        key, start = self._keys[place.index], 0
        hashed = hash_begin(key, place.kv_group)
        hashed.update(contents)
        while start < len(contents):
            if self._room <= _PIECE_BYTES:
                self._messages.append([])
                self._room = MAX_PIECES_BYTES
            end = min(len(contents), start + self._room - _PIECE_BYTES)
            last = hashed.digest() if end == len(contents) else b""
            first, part = b"" if start else key, contents[start:end].tobytes()
            self._messages[-1].append(Piece(place.index, place.kv_group, start, part, first, last))
            self._room -= _PIECE_BYTES + end - start
            start = end

    def messages(self) -> Iterator[list[Piece]]:
        """Return all messages."""
        return (message for message in self._messages if message)
