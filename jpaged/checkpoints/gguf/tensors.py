"""A GGUF file as a source of tensors under the names of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jpaged.checkpoints.gguf.blocks import BLOCK_TYPES, FLOATS, READ, weights_of
from jpaged.checkpoints.gguf.file import GgufFile, GgufTensor
from jpaged.checkpoints.gguf.names import Place
from jpaged.checkpoints.tensor_source import check_shape
from jpaged.errors import InvalidArgument, Unsupported


@dataclass(frozen=True, slots=True)
class GgufTensors:
    """The tensors of a file, as a `TensorSource`: weights, in float32 where they are quantised, or blocks.

    Attributes:
        places: of tensors, by their names in a checkpoint.
        blocks: names of those that are read as they lie: rows of bytes `[out, bytes]`.
    """

    file: GgufFile
    places: Mapping[str, Place]
    blocks: frozenset[str]

    @property
    def names(self) -> frozenset[str]:
        """See `TensorSource`."""
        return frozenset(self.places)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        tensor, place = self._stored(name), self.places[name]
        if name in self.blocks:
            block = BLOCK_TYPES[tensor.kind]
            num_out, depth = tensor.shape[-2:]
            return num_out, depth // block.size * block.num_bytes
        return place.shape(tensor)

    def dtype(self, name: str) -> np.dtype:
        """See `TensorSource`.

        Raises:
            Unsupported: its type is not read.
        """
        tensor = self._stored(name)
        if tensor.kind not in READ:
            raise Unsupported(f"{tensor.path}: tensor {name} is {tensor.kind}; of GGUF's types read: {', '.join(READ)}")
        if name in self.blocks:
            return np.dtype(np.uint8)
        return FLOATS.get(tensor.kind, np.dtype(np.float32)) if not self.places[name].offset else np.dtype(np.float32)

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> np.ndarray:
        """See `TensorSource`; of a quantised tensor the rows are read that a part has.

        Raises:
            InvalidArgument: it is misshapen, or blocks that are read as they lie are not finite.
            Unsupported: its type is not read.
        """
        check_shape(self, name, shape)
        self.dtype(name)
        tensor, place = self._stored(name), self.places[name]
        data = tensor.read(place.expert)
        if name in self.blocks:
            rows = _rows(data, place, index[:1])
            if not BLOCK_TYPES[tensor.kind].is_finite(rows):
                raise InvalidArgument(str(tensor.path), f"tensor {name} has scales of blocks that are not finite")
            return rows
        if place.is_transposed or place.is_row:
            whole = weights_of(tensor.kind, _rows(data, place, ()))
            return (whole.T if place.is_transposed else whole[None])[index]
        weights = weights_of(tensor.kind, _rows(data, place, index[:1]))
        if len(index) > 1:
            weights = weights[(slice(None), *index[1:])]
        return weights - np.float32(place.offset) if place.offset else weights

    def where(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._stored(name).path if name in self.places else self.file.path

    def _stored(self, name: str) -> GgufTensor:
        return self.file.tensors[self.places[name].tensor]


def _rows(data: np.ndarray, place: Place, index: tuple[slice, ...]) -> np.ndarray:
    """Rows of a tensor in their order, all of them or a part."""
    if place.rows is not None:
        return data[place.rows[index]] if index else data[place.rows]
    return np.asarray(data[index] if index else data)
