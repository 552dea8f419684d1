"""What process 0 and the others say while they serve: a few numbers, and words of 32 bits.

| head: i64 each, as HEADS names them | words: i32 each |
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from jpaged.device.multihost.channel import Kind

HEADS: Mapping[Kind, tuple[str, ...]] = {
    Kind.STEP: ("number", "num_tokens"),  # then the packed inputs of a forward
    Kind.SAMPLE: ("number", "detail"),  # then the rows of the sampler
    Kind.MOVES: ("move",),  # its place in `Move`; then the sources, and the destinations
    Kind.COLLECT: ("number",),
    Kind.DIGEST: ("number",),  # then the digest
    Kind.END: (),
}
"""What each kind of message begins with. Steps are numbered from 1."""

Parts = tuple[bytes, ...]
_NO_WORDS = np.zeros(0, np.int32)


def encode(kind: Kind, *head: int, words: NDArray[np.int32] = _NO_WORDS) -> Parts:
    """A message as parts, which are sent one after the other."""
    return struct.pack(f"<{len(HEADS[kind])}q", *head), words.tobytes()


def decode(kind: Kind, payload: bytes | bytearray) -> tuple[tuple[int, ...], NDArray[np.int32]]:
    """The inverse of `encode`. The words are a view of the payload."""
    head = struct.Struct(f"<{len(HEADS[kind])}q")
    return head.unpack_from(payload), np.frombuffer(payload, np.int32, offset=head.size)
