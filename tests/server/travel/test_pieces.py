"""Pieces of blocks: what is cut into messages is put together again, and what contradicts itself is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from jpaged.engine.kv_cache.offload.transfer import BlockPosition
from jpaged.errors import InvalidArgument
from jpaged.service import kv_protocol
from jpaged.service.kv_protocol import BlockPiece, Cutter, Receiving

KEYS = (b"key 0", b"key 1", b"key 2")
PLACES = [BlockPosition(index, kv_group) for index in range(3) for kv_group in range(2)]
SIZE = 250


def contents_of(place: BlockPosition) -> bytes:
    return bytes((7 * place.index + 3 * place.kv_group + i) % 256 for i in range(SIZE))


class Import:
    """Host blocks of an import, and what is entered of them."""

    num_kv_groups = 2
    bytes_per_block = SIZE

    def __init__(self, known: Iterable[BlockPosition] = ()) -> None:
        self.known = set(known)
        self.blocks: dict[int, bytearray] = {}
        self.entered: dict[BlockPosition, bytes] = {}

    def is_known(self, place: BlockPosition) -> bool:
        return place in self.known

    def write(self, block_id: int, offset: int, contents: bytes) -> None:
        self.blocks.setdefault(block_id, bytearray(SIZE))[offset : offset + len(contents)] = contents

    def enter(self, places: Sequence[BlockPosition], block_ids: Sequence[int]) -> None:
        for place, block_id in zip(places, block_ids, strict=True):
            self.entered[place] = bytes(self.blocks[block_id])


def cut(*places: BlockPosition) -> list[list[BlockPiece]]:
    cutter = Cutter(KEYS)
    for place in places:
        cutter.add(place, memoryview(contents_of(place)))
    return list(cutter.messages())


def receiving(arriving: Import, num_expected: int = 6, num_homes: int = 6) -> Receiving:
    target: Any = arriving
    found = Receiving(target, num_expected, KEYS)
    found.give(range(1, num_homes + 1))
    return found


@pytest.mark.parametrize("limit", [100, 346, 347, 600, 1 << 18])
def test_blocks_that_were_cut_are_put_together_again(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(kv_protocol, "MAX_PIECES_BYTES", limit)
    messages, arriving = cut(*PLACES), Import()
    sizes = [sum(len(piece.contents) + kv_protocol._PIECE_BYTES for piece in message) for message in messages]
    assert max(sizes) <= limit and all(sizes)
    assert len(messages) == 1 or limit < 6 * 346
    found = receiving(arriving)
    for message in messages:
        found.take(message)
    found.finish()
    assert arriving.entered == {place: contents_of(place) for place in PLACES}
    assert (found.num_blocks, found.num_known, found.is_full, found.num_to_come) == (6, 0, False, 0)


def test_messages_are_filled_before_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_protocol, "MAX_PIECES_BYTES", 346 + 97)
    lens = [[len(piece.contents) for piece in message] for message in cut(*PLACES[:2])]
    assert lens == [[250, 1], [249]]
    monkeypatch.setattr(kv_protocol, "MAX_PIECES_BYTES", 346 + 96)
    lens = [[len(piece.contents) for piece in message] for message in cut(*PLACES[:2])]
    assert lens == [[250], [250]]


def test_known_blocks_take_no_room() -> None:
    arriving = Import(PLACES[:4])
    (message,) = cut(*PLACES)
    found = receiving(arriving, num_homes=0)
    assert (found.num_missing(message), found.num_to_come) == (2, 6)
    found.give([8])
    assert (found.num_missing(message), found.num_to_come) == (1, 5)
    found.give([9])
    assert found.num_missing([*message, dataclasses.replace(message[0], index=3)]) == 0
    found.take(message)
    found.finish()
    assert set(arriving.entered) == {*PLACES[4:]} and set(arriving.blocks) == {8, 9}
    assert (found.num_blocks, found.num_known) == (6, 4)


def test_without_room_the_rest_is_left() -> None:
    arriving = Import()
    (message,) = cut(*PLACES)
    found = receiving(arriving, num_homes=4)
    found.take(message)
    found.finish()
    assert found.is_full and found.num_blocks == 4 and set(arriving.entered) == {*PLACES[:4]}


@pytest.mark.parametrize("num_pieces", [0, 5])
def test_an_end_before_all_blocks_is_refused(num_pieces: int) -> None:
    (message,) = cut(*PLACES)
    found = receiving(Import())
    found.take(message[:num_pieces])
    with pytest.raises(InvalidArgument, match=rf"^pieces: end after {num_pieces} of 6 blocks$"):
        found.finish()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"index": 3}, r"blocks\[3\]: is beyond the 3 blocks"),
        ({"kv_group": 2}, r"blocks\[1\]\.kv_group: 2 is not below 2"),
        ({"key": b"other"}, r"blocks\[1\]\.key: .* is not the key"),
        ({"index": 0, "key": KEYS[0]}, r"blocks\[0\]: is sent twice"),
        ({"offset": 1}, r"starts at byte 1 of group 0; expected blocks\[1\] of group 0 from byte 0"),
        ({"contents": b""}, r"contents: has 0 bytes at 0, which are not part of a block of 250"),
        ({"contents": bytes(SIZE + 1)}, r"contents: has 251 bytes at 0"),
        ({"contents": bytes(SIZE)}, r"blocks\[1\]\.hash: does not match"),
        ({"hash": b""}, r"blocks\[1\]\.hash: does not match"),
    ],
)
def test_a_piece_that_contradicts_its_block_is_refused_and_blocks_before_it_stay(
    change: dict[str, Any], problem: str
) -> None:
    (message,) = cut(*PLACES)
    arriving, wrong = Import(), dataclasses.replace(message[2], **change)
    with pytest.raises(InvalidArgument, match=problem):
        receiving(arriving).take([*message[:2], wrong, *message[3:]])
    assert set(arriving.entered) == {*PLACES[:2]}


def test_more_blocks_than_were_announced_are_refused() -> None:
    (message,) = cut(*PLACES)
    with pytest.raises(InvalidArgument, match=r"blocks\[1\]: is one more than the 3 blocks"):
        receiving(Import(), num_expected=3).take(message)
