"""Messages of a prefix transfer: a header, then pieces of blocks, in order within a block.

    header   the tokens, and what the bytes depend on
    piece    [key] contents ... contents [hash]     the key is in a block's first piece, the hash in its last

Block keys in messages are those of the tokens after a root without a tenant; each server adds the tenant itself.

`get_facts` lists everything that the bytes of a block depend on; the list is sent with an export and checked on import.
`Receiving` writes pieces to blocks of host memory. It verifies that each key belongs to its tokens and that the
contents are intact.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from jpaged.engine.executor import BlockArrays
from jpaged.engine.kv_cache.blocks import BlockHash
from jpaged.engine.kv_cache.offload.transfer import BlockHashChain, BlockPosition, PrefixExport, PrefixImport
from jpaged.errors import Incompatible, InvalidArgument
from jpaged.service.loaded_model import LoadedModel

MAX_PIECES_BYTES = 256 << 10
"""Limit of a message's contents, including the overhead of each piece."""
MAX_MESSAGE_BYTES = 257 << 10
"""Limit of a whole message."""
_PIECE_BYTES = 96
"""Approximate overhead of a piece."""
MAX_PIECES = MAX_PIECES_BYTES // _PIECE_BYTES + 1
"""Maximum pieces of a message, reached if each holds one byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferHeader:
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
class BlockPiece:
    """A part of a block, or all of it; see PrefixPiece in prefixes.proto."""

    index: int
    kv_group: int
    offset: int
    contents: bytes
    key: bytes = b""
    hash: bytes = b""


@dataclass(frozen=True, slots=True)
class ImportResult:
    """Result of an import; see PrefixArrival in prefixes.proto."""

    num_tokens: int
    num_found_tokens: int
    num_loaded_blocks: int
    num_known_blocks: int
    is_short_of_room: bool = False


def hash_begin(key: BlockHash, kv_group: int) -> hashlib._Hash:
    """Return the hash state of a block before any contents are added."""
    return hashlib.sha256(key + kv_group.to_bytes(4, "little"))


def cut(leaving: PrefixExport, part: int, keys: Sequence[BlockHash]) -> list[list[BlockPiece]]:
    """Return the messages of a part that is in host memory. Call on a thread, see `PrefixExport.read`."""
    cutter = Cutter(keys)
    leaving.read(part, cutter.add)
    return list(cutter.messages())


class Cutter:
    """Cuts blocks into messages of pieces, on a thread.

    Args:
        keys: keys of the blocks, as sent in messages.
    """

    def __init__(self, keys: Sequence[BlockHash]) -> None:
        self._keys = keys
        self._messages: list[list[BlockPiece]] = [[]]
        self._room = MAX_PIECES_BYTES

    def add(self, place: BlockPosition, contents: memoryview) -> None:
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
            self._messages[-1].append(BlockPiece(place.index, place.kv_group, start, part, first, last))
            self._room -= _PIECE_BYTES + end - start
            start = end

    def messages(self) -> Iterator[list[BlockPiece]]:
        """Return all messages."""
        return (message for message in self._messages if message)


def get_facts(model: LoadedModel) -> tuple[tuple[str, str], ...]:
    """Return readable (name, value) pairs of everything that the bytes of a block depend on."""
    backend, transfer = model.backend, model.engine.kv_transfer
    facts = {
        "model": model.model.architecture,
        "layers": model.model.num_layers,
        "key/value heads": model.model.num_kv_heads,
        "head dimension": model.model.head_dim,
        "dtype": model.model.dtype,
        "kv_cache_dtype": model.config.cache.kv_cache_dtype,
        "lossy_kv_window": model.model.lossy_kv_window,
        "lossy_kv_sinks": model.model.lossy_kv_sinks,
        "block_size": transfer.block_size,
        "bytes of a block": transfer.bytes_per_block,
        "KV groups": transfer.num_kv_groups,
        "device": f"{backend.platform} {backend.device_kind}",
        "attention": backend.attention,
        "tensor_parallel_size": model.config.parallel.tensor_parallel_size,
        "context_parallel_size": model.config.parallel.context_parallel_size,
        "pipeline_parallel_size": model.config.parallel.pipeline_parallel_size,
        "jax": backend.jax_version,
    }
    return tuple((name, str(value)) for name, value in facts.items())


def get_header(
    model: LoadedModel,
    cache_salt: str,
    adapter_name: str,
    chain: BlockHashChain,
    leaving: PrefixExport,
    num_found: int,
    identity: bytes,
) -> TransferHeader:
    """Return the header of an exported prefix, of which `num_found` blocks were found."""
    transfer, adapter = model.engine.kv_transfer, model.adapters.named(adapter_name)
    size = transfer.block_size
    return TransferHeader(
        kv_identity=identity,
        facts=get_facts(model),
        block_size=size,
        bytes_per_block=transfer.bytes_per_block,
        num_kv_groups=transfer.num_kv_groups,
        token_ids=chain.token_ids[: leaving.num_blocks * size],
        num_found_tokens=num_found * size,
        num_blocks=len(leaving.positions),
        cache_salt=cache_salt,
        adapter=adapter_name,
        adapter_digest=b"" if adapter is None else adapter.digest,
    )


def check_compatible(model: LoadedModel, header: TransferHeader, chain: BlockHashChain, identity: bytes) -> None:
    """Reject a prefix whose blocks are incompatible with this server's, or a header that contradicts itself."""
    if header.kv_identity != identity:
        here, there = dict(get_facts(model)), dict(header.facts)
        differing = [name for name in here if there.get(name, here[name]) != here[name]]
        told = [f"{name} is {there[name][:128]!r} there and {here[name]!r} here" for name in differing]
        why = "; ".join(told) or "the weights, the scales of the KV cache, or the kernels that computed it"
        raise Incompatible(f"the blocks of the prefix are incompatible with this server: {why}")
    adapter, transfer = model.adapters.named(header.adapter), model.engine.kv_transfer
    if header.adapter_digest != (b"" if adapter is None else adapter.digest):
        raise Incompatible(f"adapter: {header.adapter!r} differs here from the adapter of the prefix")
    sizes = header.block_size, header.bytes_per_block, header.num_kv_groups
    if sizes != (transfer.block_size, transfer.bytes_per_block, transfer.num_kv_groups):
        raise InvalidArgument("header", f"sizes {sizes} contradict its kv_identity")
    if len(chain.token_ids) != len(header.token_ids):
        most = len(chain.token_ids)
        raise InvalidArgument(
            "header.token_ids", f"{len(header.token_ids)} tokens; only {most} of them fill blocks that can be cached"
        )
    if header.num_blocks > len(chain.keys) * header.num_kv_groups:
        raise InvalidArgument("header.num_blocks", f"{header.num_blocks} blocks are more than the tokens have")


@dataclass(slots=True, eq=False)
class _ReceivedBlock:
    """The block being received. `home` is None if this server already has the block."""

    place: BlockPosition
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

    def __init__(self, arriving: PrefixImport, num_expected: int, keys: Sequence[BlockHash]) -> None:
        self.num_blocks = self.num_known = 0
        self.is_full = False
        self._arriving = arriving
        self._num_expected = num_expected
        self._keys = keys
        self._homes: deque[int] = deque()
        self._seen: set[BlockPosition] = set()
        self._block: _ReceivedBlock | None = None

    def num_missing(self, pieces: Iterable[BlockPiece]) -> int:
        """Return the number of host blocks to reserve before these pieces can be written."""
        num_begun = 0
        for piece in pieces:
            if not piece.offset and piece.index < len(self._keys) and piece.kv_group < self._arriving.num_kv_groups:
                num_begun += not self._arriving.is_known(BlockPosition(piece.index, piece.kv_group))
        return max(0, min(num_begun, self._num_expected - len(self._seen)) - len(self._homes))

    @property
    def num_to_come(self) -> int:
        """Number of blocks that have not begun to arrive and have no host block yet."""
        return max(0, self._num_expected - len(self._seen) - len(self._homes))

    def give(self, homes: Iterable[int]) -> None:
        """Add reserved host blocks."""
        self._homes.extend(homes)

    def take(self, pieces: Iterable[BlockPiece]) -> None:
        """Write pieces, and insert the completed blocks into the prefix cache.

        Raises:
            InvalidArgument: a piece is out of order or belongs to no block; a key or a hash is wrong.
        """
        places: list[BlockPosition] = []
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

    def take_arrays(self, contents: BlockArrays, positions: Sequence[tuple[int, int]]) -> None:
        """Insert blocks in device arrays into the prefix cache, except those that are here or have no room.

        Raises:
            InvalidArgument: a block is sent twice.
        """
        places = [BlockPosition(index, kv_group) for index, kv_group in positions]
        homes: list[int] = []
        if len(set(places)) < len(places) or not self._seen.isdisjoint(places):
            raise InvalidArgument("positions", "name a block twice")
        self._seen.update(places)
        for place in places:
            is_ours = place.index < len(self._keys) and 0 <= place.kv_group < self._arriving.num_kv_groups
            is_known = is_ours and self._arriving.is_known(place)
            self.is_full = self.is_full or (is_ours and not is_known and not self._homes)
            homes.append(self._homes.popleft() if is_ours and not is_known and self._homes else 0)
            self.num_blocks += is_known or homes[-1] > 0
            self.num_known += is_known
        if any(homes):
            self._arriving.receive(contents, places, homes)

    def finish(self) -> None:
        """Note the end of the pieces.

        Raises:
            InvalidArgument: a block is missing or incomplete.
        """
        if not self.is_full and (self._block is not None or self.num_blocks < self._num_expected):
            raise InvalidArgument("pieces", f"end after {self.num_blocks} of {self._num_expected} blocks")

    def _begin(self, piece: BlockPiece) -> _ReceivedBlock | None:
        """Return the block that begins with this piece; None if there is no room."""
        where = _name(piece)
        if piece.index >= len(self._keys):
            raise InvalidArgument(where, f"is beyond the {len(self._keys)} blocks of the tokens")
        if piece.kv_group >= self._arriving.num_kv_groups:
            raise InvalidArgument(f"{where}.kv_group", f"{piece.kv_group} is not below {self._arriving.num_kv_groups}")
        if piece.key != self._keys[piece.index]:
            raise InvalidArgument(f"{where}.key", f"{piece.key.hex()[:16]}... is not the key of the block's tokens")
        place = BlockPosition(piece.index, piece.kv_group)
        if place in self._seen:
            raise InvalidArgument(where, "is sent twice")
        if len(self._seen) == self._num_expected:
            raise InvalidArgument(where, f"is one more than the {self._num_expected} blocks that were announced")
        self._seen.add(place)
        if self._arriving.is_known(place):
            return _ReceivedBlock(place, None, hash_begin(piece.key, place.kv_group))
        if not self._homes:
            return None
        return _ReceivedBlock(place, self._homes.popleft(), hash_begin(piece.key, place.kv_group))

    def _add(self, block: _ReceivedBlock, piece: BlockPiece) -> None:
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

    def _finish(self, block: _ReceivedBlock, piece: BlockPiece) -> None:
        if block.hashed.digest() != piece.hash:
            raise InvalidArgument(f"{_name(piece)}.hash", "does not match the contents, which changed in transit")
        self.num_blocks += 1
        self.num_known += block.home is None


def _name(piece: BlockPiece) -> str:
    return f"blocks[{piece.index}]"
