"""Pieces -> blocks of host memory. Verifies that each key belongs to its tokens and that the contents are intact."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jpaged.engine.kv.blocks import Key
from jpaged.engine.kv.tiers.leaving import Arriving, Place
from jpaged.errors import InvalidArgument
from jpaged.service.prefixes.parts import Piece, hash_begin

if TYPE_CHECKING:
    import hashlib


@dataclass(slots=True, eq=False)
class _Block:
    """The block being received. `home` is None if this server already has the block."""

    place: Place
    home: int | None
    hashed: hashlib._Hash
    num_bytes: int = 0


class Receiving:
    """Receiver of the pieces of one prefix, on threads, one message at a time.

    Attributes:
        num_blocks: complete blocks received.
        num_known: those of them that this server already had.
        is_full: there was no room for a block; further pieces are useless.

    Args:
        num_expected: maximum number of blocks.
        keys: keys of the blocks, as sent in messages.
    """

    def __init__(self, arriving: Arriving, num_expected: int, keys: Sequence[Key]) -> None:
        self.num_blocks = self.num_known = 0
        self.is_full = False
        self._arriving = arriving
        self._num_expected = num_expected
        self._keys = keys
        self._homes: deque[int] = deque()
        self._seen: set[Place] = set()
        self._block: _Block | None = None

    def num_missing(self, pieces: Iterable[Piece]) -> int:
        """Return the number of host blocks to reserve before these pieces can be written."""
        num_begun = 0
        for piece in pieces:
            if not piece.offset and piece.index < len(self._keys) and piece.kv_group < self._arriving.num_kv_groups:
                num_begun += not self._arriving.is_known(Place(piece.index, piece.kv_group))
        return max(0, min(num_begun, self._num_expected - len(self._seen)) - len(self._homes))

    @property
    def num_to_come(self) -> int:
        """Number of blocks that have not begun to arrive and have no host block yet."""
        return max(0, self._num_expected - len(self._seen) - len(self._homes))

    def give(self, homes: Iterable[int]) -> None:
        """Add reserved host blocks."""
        self._homes.extend(homes)

    def take(self, pieces: Iterable[Piece]) -> None:
        """Write pieces, and insert the completed blocks into the prefix cache.

        Raises:
            InvalidArgument: a piece is out of order or belongs to no block; a key or a hash is wrong.
        """
        places: list[Place] = []
        homes: list[int] = []
        try:
            for piece in pieces:
                block = self._begin(piece) if self._block is None else self._block
                if block is None:
                    self.is_full = True
                    return
                self._block = block
                self._add(block, piece)
                if block.num_bytes == self._arriving.bytes_per_block:
                    self._block = None
                    self._finish(block, piece)
                    if block.home is not None:
                        places.append(block.place)
                        homes.append(block.home)
        finally:
            self._arriving.enter(places, homes)

    def finish(self) -> None:
        """Note the end of the pieces.

        Raises:
            InvalidArgument: a block is missing or incomplete.
        """
        if not self.is_full and (self._block is not None or self.num_blocks < self._num_expected):
            raise InvalidArgument("pieces", f"end after {self.num_blocks} of {self._num_expected} blocks")

    def _begin(self, piece: Piece) -> _Block | None:
        """Return the block that begins with this piece; None if there is no room."""
        where = _name(piece)
        if piece.index >= len(self._keys):
            raise InvalidArgument(where, f"is beyond the {len(self._keys)} blocks of the tokens")
        if piece.kv_group >= self._arriving.num_kv_groups:
            raise InvalidArgument(f"{where}.kv_group", f"{piece.kv_group} is not below {self._arriving.num_kv_groups}")
        if piece.key != self._keys[piece.index]:
            raise InvalidArgument(f"{where}.key", f"{piece.key.hex()[:16]}... is not the key of the block's tokens")
        place = Place(piece.index, piece.kv_group)
        if place in self._seen:
            raise InvalidArgument(where, "is sent twice")
        if len(self._seen) == self._num_expected:
            raise InvalidArgument(where, f"is one more than the {self._num_expected} blocks that were announced")
        self._seen.add(place)
        if self._arriving.is_known(place):
            return _Block(place, None, hash_begin(piece.key, place.kv_group))
        if not self._homes:
            return None
        return _Block(place, self._homes.popleft(), hash_begin(piece.key, place.kv_group))

    def _add(self, block: _Block, piece: Piece) -> None:
        where, place = _name(piece), block.place
        if (piece.index, piece.kv_group, piece.offset) != (place.index, place.kv_group, block.num_bytes):
            wanted = f"blocks[{place.index}] of group {place.kv_group} from byte {block.num_bytes}"
            raise InvalidArgument(where, f"starts at byte {piece.offset} of group {piece.kv_group}; expected {wanted}")
        end = block.num_bytes + len(piece.contents)
        if not piece.contents or end > self._arriving.bytes_per_block:
            what = f"has {len(piece.contents)} bytes at {piece.offset}"
            raise InvalidArgument(
                f"{where}.contents", f"{what}, which are not part of a block of {self._arriving.bytes_per_block}"
            )
        block.hashed.update(piece.contents)
        if block.home is not None:
            self._arriving.write(block.home, block.num_bytes, piece.contents)
        block.num_bytes = end

    def _finish(self, block: _Block, piece: Piece) -> None:
        if block.hashed.digest() != piece.hash:
            raise InvalidArgument(f"{_name(piece)}.hash", "does not match the contents, which changed in transit")
        self.num_blocks += 1
        self.num_known += block.home is None


def _name(piece: Piece) -> str:
    return f"blocks[{piece.index}]"
