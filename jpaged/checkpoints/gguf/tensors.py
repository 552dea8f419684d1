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
    """The tensors of a file, as a `TensorSource`: weights, in float32 if they are quantized, or blocks.

    Attributes:
        places: of tensors, by their names in a checkpoint.
        blocks: names of tensors that are read as stored blocks: rows of bytes `[out, bytes]`.
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
            Unsupported: the type is not supported.
        """
        tensor = self._stored(name)
        if tensor.kind not in READ:
            raise Unsupported(
                f"{tensor.path}: tensor {name} has type {tensor.kind}; supported GGUF types: {', '.join(READ)}"
            )
        if name in self.blocks:
            return np.dtype(np.uint8)
        return FLOATS.get(tensor.kind, np.dtype(np.float32)) if not self.places[name].offset else np.dtype(np.float32)

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> np.ndarray:
        """See `TensorSource`; of a quantized tensor only the rows of the part are converted.

        Raises:
            InvalidArgument: it is misshapen, or stored blocks are not finite.
            Unsupported: the type is not supported.
        """
        check_shape(self, name, shape)
        self.dtype(name)
        tensor, place = self._stored(name), self.places[name]
        data = tensor.read(place.expert)
        if name in self.blocks:
            rows = _rows(data, place, index[:1])
            if not BLOCK_TYPES[tensor.kind].is_finite(rows):
                raise InvalidArgument(str(tensor.path), f"tensor {name} has block scales that are not finite")
            return rows
        if place.is_transposed or place.is_row:
            whole = weights_of(tensor.kind, _rows(data, place, ()))
            return (whole.T if place.is_transposed else whole[None])[index]
        weights = weights_of(tensor.kind, _rows(data, place, index[:1]))
        if len(index) > 1:
            weights = weights[(slice(None), *index[1:])]
        return weights - np.float32(place.offset) if place.offset else weights

    def where(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._stored(name).path if name in self.places else self.file.path

    def _stored(self, name: str) -> GgufTensor:
        return self.file.tensors[self.places[name].tensor]


def _rows(data: np.ndarray, place: Place, index: tuple[slice, ...]) -> np.ndarray:
    """Return all rows of a tensor, or a part of them, in the checkpoint's order."""
    if place.rows is not None:
        return data[place.rows[index]] if index else data[place.rows]
    return np.asarray(data[index] if index else data)
