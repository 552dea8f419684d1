"""Interface of checkpoint readers, for files of any format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from jpaged.errors import InvalidArgument, Unsupported

DTYPES: Mapping[str, np.dtype] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""Types of weights, by name."""

PACKED_DTYPES: Mapping[str, np.dtype] = {
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""Additional types in quantized checkpoints."""
_POINTER = b"version https://git-lfs.github.com/spec/"
ALL_DTYPES = {**DTYPES, **PACKED_DTYPES}


class TensorSource(Protocol):
    """The tensors of one model under the names of Hugging Face, independent of jpaged's parameter tree."""

    @property
    def names(self) -> frozenset[str]:
        """Every stored tensor."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one of `names`, as stored."""

    def dtype(self, name: str) -> np.dtype:
        """Return the type of one of `names`, as stored.

        Raises:
            Unsupported: it is not among `ALL_DTYPES`.
        """

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> np.ndarray:
        """Read one tensor, or a part of it, in its stored type.

        Args:
            shape: required shape.
            index: slices of the first axes; not much else is read.

        Raises:
            InvalidArgument: it is missing, misshapen, or cannot be read.
            Unsupported: its type is not supported.
        """

    def where(self, name: str) -> Path:
        """Return the path for error messages: the file that holds a tensor, or the folder."""


def check_shape(source: TensorSource, name: str, shape: tuple[int, ...]) -> None:
    """Raise an error if a tensor is missing or misshapen.

    Raises:
        InvalidArgument: names the tensor, and its shape according to config.json.
    """
    where = str(source.where(name))
    if name not in source.names:
        raise InvalidArgument(where, f"tensor {name} {list(shape)} is missing from the checkpoint")
    stored = source.shape(name)
    if stored != shape:
        raise InvalidArgument(where, f"tensor {name} has shape {list(stored)}; config.json requires {list(shape)}")


def read_weight(source: TensorSource, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> np.ndarray:
    """`TensorSource.read` for weights or biases: the type must be in `DTYPES`."""
    tensor = source.read(name, shape, index)
    if tensor.dtype.name not in DTYPES:
        raise unsupported_dtype(source.where(name), name, tensor.dtype.name)
    return tensor


def read_integers(source: TensorSource, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> np.ndarray:
    """`TensorSource.read` for integers."""
    tensor = source.read(name, shape, index)
    if tensor.dtype.kind != "i":
        raise Unsupported(f"{source.where(name)}: tensor {name} is {tensor.dtype.name}; it must contain integers")
    return tensor


def unreadable(path: Path, problem: str) -> InvalidArgument:
    """Return the error for a file that cannot be read, with the cause if the file shows it."""
    if path.is_symlink() and not path.exists():
        problem = (
            f"is a link to {path.readlink()}, which is missing: a download was interrupted; download the model again"
        )
    elif path.is_file():
        with path.open("rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                problem = "is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder"
    return InvalidArgument(str(path), problem)


def unsupported_dtype(where: Path, name: str, dtype: str) -> Unsupported:
    """Return the error for a tensor whose type is not in `DTYPES`."""
    return Unsupported(f"{where}: tensor {name} is {dtype}; supported: {', '.join(DTYPES)}")
