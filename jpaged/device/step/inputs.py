"""One host buffer for all small arrays of a call: packed with numpy, taken apart inside of the program.

    fields   token ids [T] i32 | positions [T] i32 | block tables [S, M] i32 | ...
    buffer   int32 [sum of sizes], the bits of all fields one after the other

The rows of the sampler are so by themselves: records, one after the other, of the fields that are declared there.

A call then has one argument to transfer instead of a dozen: on a CPU that saves 10 of 90 us, on an accelerator each
argument would be a copy of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import ROW_FIELDS
from jpaged.errors import InternalError


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a call; its element type has 32 bits, or is bool."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Packing:
    """The fields of a buffer, in order. Hashable: static under jit."""

    fields: tuple[Field, ...]

    @classmethod
    def of(cls, **fields: tuple[tuple[int, ...], str]) -> Packing:
        """A packing from name=(shape, element type)."""
        return cls(tuple(Field(name, shape, np.dtype(dtype)) for name, (shape, dtype) in fields.items()))

    @property
    def size(self) -> int:
        return sum(field.size for field in self.fields)

    def pack(self, values: object) -> NDArray[np.int32]:
        """The attributes of `values` that the fields name, in a fresh buffer: the device may read it after the call.

        An int counts as an int32 array without axes.

        Raises:
            InternalError: an array is of another shape or type than its field.
        """
        parts = []
        for field in self.fields:
            array = getattr(values, field.name)
            if type(array) is int:
                array = np.asarray(array, np.int32)
            if array.shape != field.shape or array.dtype != field.dtype:
                raise InternalError(
                    f"{field.name} is {array.dtype}{array.shape}; the program takes {field.dtype}{field.shape}"
                )
            parts.append((array.astype(np.int32) if array.dtype == np.bool_ else array.view(np.int32)).reshape(-1))
        return np.concatenate(parts)

    def unpack(self, buffer: jax.Array) -> dict[str, jax.Array]:
        """The arrays by name, on the device; the axes before the last are those of every array."""
        arrays, begin = {}, 0
        for field in self.fields:
            part = buffer[..., begin : begin + field.size].reshape(*buffer.shape[:-1], *field.shape)
            if field.dtype == np.bool_:
                part = part != 0
            elif field.dtype != np.int32:
                part = jax.lax.bitcast_convert_type(part, field.dtype)
            arrays[field.name] = part
            begin += field.size
        return arrays


_ROW = Packing.of(**{field.name: (() if field.width is None else (field.width,), field.dtype) for field in ROW_FIELDS})
ROW_WORDS = _ROW.size
"""Words of a row of the sampler."""


def unpack_rows(words: jax.Array) -> dict[str, jax.Array]:
    """The fields of `SamplingInputs.words` by name, on the device, with rows for their first axis."""
    return _ROW.unpack(words.reshape(-1, ROW_WORDS))


@dataclass(frozen=True, slots=True)
class PackedForward:
    """A step's inputs as the forward of so many tokens takes them."""

    num_tokens: int
    words: NDArray[np.int32]
