"""Conversion of headers and pieces of prefixes to messages, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from jpaged._proto.v1 import prefixes_pb2
from jpaged.errors import InvalidArgument
from jpaged.service.kv_protocol import MAX_PIECES, Arrival, Header, Piece

_Part = TypeVar("_Part", prefixes_pb2.SavePrefixResponse, prefixes_pb2.LoadPrefixRequest)


def response_of(part: Header | Sequence[Piece]) -> prefixes_pb2.SavePrefixResponse:
    """Convert a part to a message."""
    if isinstance(part, Header):
        return prefixes_pb2.SavePrefixResponse(header=_header_of(part))
    return prefixes_pb2.SavePrefixResponse(pieces=pieces_of(part))


def pieces_of(part: Sequence[Piece]) -> prefixes_pb2.PrefixPieces:
    """Convert pieces to a message."""
    pieces = [
        prefixes_pb2.PrefixPiece(
            index=piece.index,
            kv_group=piece.kv_group,
            offset=piece.offset,
            contents=piece.contents,
            key=piece.key,
            hash=piece.hash,
        )
        for piece in part
    ]
    return prefixes_pb2.PrefixPieces(pieces=pieces)


def part_from(message: _Part) -> Header | Sequence[Piece]:
    """Convert a message to a part.

    Raises:
        InvalidArgument: it has no part, or a part with no or too many pieces.
    """
    match message.WhichOneof("part"):
        case "header":
            return _header_from(message.header)
        case "pieces":
            return _pieces_from(message.pieces)
        case _:
            raise InvalidArgument("part", "is missing: give header or pieces")


def arrival_of(arrival: Arrival) -> prefixes_pb2.PrefixArrival:
    """Convert the result of an import to a message."""
    return prefixes_pb2.PrefixArrival(
        num_tokens=arrival.num_tokens,
        num_found_tokens=arrival.num_found_tokens,
        num_loaded_blocks=arrival.num_loaded_blocks,
        num_known_blocks=arrival.num_known_blocks,
        is_short_of_room=arrival.is_short_of_room,
    )


def _pieces_from(message: prefixes_pb2.PrefixPieces) -> list[Piece]:
    if not 1 <= len(message.pieces) <= MAX_PIECES:
        raise InvalidArgument("pieces", f"a message has {len(message.pieces)}: must be from 1 to {MAX_PIECES}")
    return [
        Piece(piece.index, piece.kv_group, piece.offset, piece.contents, piece.key, piece.hash)
        for piece in message.pieces
    ]


def _header_of(header: Header) -> prefixes_pb2.PrefixHeader:
    return prefixes_pb2.PrefixHeader(
        kv_identity=header.kv_identity,
        facts=[prefixes_pb2.KvFact(name=name, value=value) for name, value in header.facts],
        block_size=header.block_size,
        bytes_per_block=header.bytes_per_block,
        num_kv_groups=header.num_kv_groups,
        token_ids=header.token_ids,
        num_found_tokens=header.num_found_tokens,
        num_blocks=header.num_blocks,
        cache_salt=header.cache_salt,
        adapter=header.adapter,
        adapter_digest=header.adapter_digest,
    )


def _header_from(message: prefixes_pb2.PrefixHeader) -> Header:
    return Header(
        kv_identity=message.kv_identity,
        facts=tuple((fact.name, fact.value) for fact in message.facts),
        block_size=message.block_size,
        bytes_per_block=message.bytes_per_block,
        num_kv_groups=message.num_kv_groups,
        token_ids=tuple(message.token_ids),
        num_found_tokens=message.num_found_tokens,
        num_blocks=message.num_blocks,
        cache_salt=message.cache_salt,
        adapter=message.adapter,
        adapter_digest=message.adapter_digest,
    )
