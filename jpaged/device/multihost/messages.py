"""Message formats of process 0 and the others while they serve: a few numbers, and 32-bit words.

| head: i64 each, as HEADS names them | words: i32 each |
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from jpaged.device.multihost.channel import Kind
from jpaged.engine.executor import ROW_DTYPE, Detail, SamplingInputs
from jpaged.engine.executor.rows import EDIT_DTYPE, SINGLE_DTYPE, CountDue, EditInputs

HEADS: Mapping[Kind, tuple[str, ...]] = {
    Kind.STEP: ("number", "num_tokens"),  # then the packed inputs of a forward
    # Then the sampler's rows, and their logits processors: words of the records, of token biases, of masks.
    Kind.SAMPLE: ("number", "detail", "num_rows", "num_edit_words", "num_single_words", "num_mask_words"),
    Kind.TELL: ("number", "tell", "num_rows"),  # then places and ids
    Kind.COUNT: ("slot", "num_prompt"),  # then the tokens
    Kind.MOVES: ("move",),  # its index in `Move`; then the sources, and the destinations
    Kind.COLLECT: ("number",),
    Kind.DIGEST: ("number",),  # then the digest
    Kind.END: (),
}
"""The head fields of each kind of message. Steps are numbered from 1."""

Parts = tuple[bytes, ...]
_NO_WORDS = np.zeros(0, np.int32)


def encode(kind: Kind, *head: int, words: NDArray[np.int32] = _NO_WORDS) -> Parts:
    """Return a message as parts, to be sent in order."""
    return struct.pack(f"<{len(HEADS[kind])}q", *head), words.tobytes()


def decode(kind: Kind, payload: bytes | bytearray) -> tuple[tuple[int, ...], NDArray[np.int32]]:
    """Parse a message; the inverse of `encode`. The words are a view of the payload."""
    head = struct.Struct(f"<{len(HEADS[kind])}q")
    return head.unpack_from(payload), np.frombuffer(payload, np.int32, offset=head.size)


def words_of(inputs: SamplingInputs) -> NDArray[np.int32]:
    """Return all inputs of a sample as words."""
    return np.concatenate([part.reshape(-1) for part in _parts(inputs)])


def sizes_of(inputs: SamplingInputs) -> tuple[int, int, int, int]:
    """Return the number of rows, and the numbers of words of their logits processors."""
    _, edits, singles, mask = _parts(inputs)
    return len(inputs.rows_r), edits.size, singles.size, mask.size


def sampling_of(
    detail: Detail, sizes: tuple[int, ...], words: NDArray[np.int32], due: Sequence[CountDue]
) -> SamplingInputs:
    """Parse the inputs of a sample; the inverse of `words_of`, with the count messages received before."""
    num_rows, *num_words = sizes
    rows, edits, singles, mask = np.split(words, np.cumsum([len(words) - sum(num_words), *num_words[:-1]]).tolist())
    found: EditInputs | None = None
    if len(edits):
        found = EditInputs(
            edits.view(EDIT_DTYPE),
            singles.view(SINGLE_DTYPE).reshape(num_rows, -1) if len(singles) else None,
            mask.reshape(num_rows, -1) if len(mask) else None,
            tuple(due),
        )
    return SamplingInputs(rows.view(ROW_DTYPE), detail, found)


def _parts(inputs: SamplingInputs) -> tuple[NDArray[np.int32], ...]:
    edits = inputs.edits
    if edits is None:
        return inputs.words, _NO_WORDS, _NO_WORDS, _NO_WORDS
    singles, mask_rw = edits.single_words, edits.mask_rw
    return (
        inputs.words,
        edits.words,
        _NO_WORDS if singles is None else singles.reshape(-1),
        _NO_WORDS if mask_rw is None else mask_rw.reshape(-1),
    )
