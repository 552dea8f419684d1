"""One host buffer for all small arrays of a call: packed with numpy, taken apart inside of the program.

    fields   temperature [R] f32 | top_k [R] i32 | seeds [R, 2] u32 | ...
    buffer   int32 [sum of sizes], the bits of all fields one after the other

A call then has one argument to transfer instead of a dozen: on a CPU that saves 10 of 90 us, on an accelerator each
argument would be a copy of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jpaged.errors import InternalError


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a call; its element type has 32 bits, or is bool."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Packing:
    """The fields of a buffer, in order. Hashable: static under jit."""

    fields: tuple[Field, ...]

    @property
    def size(self) -> int:
        return sum(field.size for field in self.fields)

    def pack(self, arrays: dict[str, NDArray]) -> NDArray[np.int32]:
        """A fresh buffer: the device may still read it after the call that it went into.

        Raises:
            InternalError: an array is missing, or of another shape or type than its field.
        """
        buffer = np.empty(self.size, np.int32)
        begin = 0
        for field in self.fields:
            array = arrays.get(field.name)
            if array is None or array.shape != field.shape or array.dtype != field.dtype:
                got = "missing" if array is None else f"{array.dtype}{array.shape}"
                raise InternalError(f"{field.name} is {got}; the program takes {field.dtype}{field.shape}")
            part = buffer[begin : begin + field.size]
            part[:] = (array.astype(np.int32) if array.dtype == np.bool_ else array.view(np.int32)).reshape(-1)
            begin += field.size
        return buffer

    def unpack(self, buffer: jax.Array) -> dict[str, jax.Array]:
        """The arrays by name, on the device."""
        arrays, begin = {}, 0
        for field in self.fields:
            part = buffer[begin : begin + field.size].reshape(field.shape)
            if field.dtype == "bool":
                part = part != 0
            elif field.dtype != "int32":
                part = jax.lax.bitcast_convert_type(part, jnp.dtype(field.dtype))
            arrays[field.name] = part
            begin += field.size
        return arrays
