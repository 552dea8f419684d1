"""Interface of checkpoint readers for files of any format, and safetensors files: read and written tensor by tensor.

    8 bytes: length of the header | header: JSON, padded with spaces to 8 bytes | the tensors, one after another

The library's own writer takes all tensors of a file at once. A checkpoint of several files has an index file in the
format of transformers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import ml_dtypes
import numpy as np

from jpaged import json_text
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


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

ORIGINAL_FILE, ORIGINAL_CONFIG = "consolidated.safetensors", "params.json"
ORIGINAL_PROBLEM = (
    f"{ORIGINAL_FILE} with {ORIGINAL_CONFIG} is Mistral's own layout, which is not supported: download the files of "
    f"the same model in Hugging Face's layout (config.json and {SINGLE_FILE})"
)

FORMAT_DTYPES: Mapping[str, np.dtype] = {
    "F64": DTYPES["float64"],
    "F32": DTYPES["float32"],
    "F16": DTYPES["float16"],
    "BF16": DTYPES["bfloat16"],
    "I8": ALL_DTYPES["int8"],
    "U8": ALL_DTYPES["uint8"],
    "I32": ALL_DTYPES["int32"],
    "I64": ALL_DTYPES["int64"],
    "F8_E4M3": ALL_DTYPES["float8_e4m3fn"],
    "F8_E8M0": ALL_DTYPES["float8_e8m0fnu"],
}
"""Types by their names in the format."""


MAX_HEADER_BYTES = 100_000_000
"""Limit of the format."""
MAX_INDEX_BYTES = 1 << 26
"""Limit of the index of a checkpoint's shards; that of DeepSeek-V3 has 9 MB."""
_LENGTH_BYTES = 8
_CHUNK_BYTES = 1 << 24
"""Bytes read at a time if a part is cut out of each row."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """Location of a tensor in its file: `begin` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


class StableFile:
    """A file that is read with `pread` and must not change during that time.

    Other programs may overwrite it: access to a mapped page of a truncated file would kill the process (SIGBUS).

    Attributes:
        state: size and modification time.

    Args:
        state: required state; None for the current one.

    Raises:
        InvalidArgument: the file cannot be opened.
    """

    def __init__(self, path: Path, state: tuple[int, int] | None = None) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidArgument(str(path), f"cannot be read: {error.strerror}") from error
        self.state = state or self._state_now()

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def fill(self, array: np.ndarray, begin: int) -> None:
        """Read all bytes of a contiguous array from an unchanged file.

        Raises:
            InvalidArgument: the file has changed.
        """
        into, done = memoryview(array.reshape(-1).view(np.uint8).data), 0
        while done < len(into):
            num_bytes = os.preadv(self._descriptor, [into[done:]], begin + done)
            if not num_bytes:
                raise self._changed()
            done += num_bytes
        if self._state_now() != self.state:
            raise self._changed()

    def _state_now(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    def _changed(self) -> InvalidArgument:
        return InvalidArgument(
            str(self._path),
            "changed while it was read: write a new file, rename it over the old one, then try again",
        )


def read_bounded(path: Path, limit: int) -> bytes:
    """Read a metadata file of at most `limit` bytes.

    Raises:
        InvalidArgument: it is larger; nothing beyond the limit is read.
        OSError: it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        _require_at_most(path, os.fstat(file.fileno()).st_size, limit)
        contents = b""
        while more := file.read(limit + 1 - len(contents)):
            contents += more
    _require_at_most(path, len(contents), limit)
    return contents


def require_bounded(path: Path, limit: int) -> None:
    """Check the size of a metadata file that a library will read.

    Raises:
        InvalidArgument: it has more than `limit` bytes.
    """
    _require_at_most(path, path.stat().st_size, limit)


def _require_at_most(path: Path, size: int, limit: int) -> None:
    if size > limit:
        raise InvalidArgument(str(path), f"has {size} bytes; the limit for this file is {limit} bytes")


class _TensorFile:
    """One safetensors file.

    Raises:
        InvalidArgument: the file is incomplete, or changes while it is read.
    """

    def __init__(self, path: Path, max_header_bytes: int) -> None:
        self._path = path
        self._max_header_bytes = max_header_bytes
        self._file = StableFile(path)
        self.close = self._file.close
        try:
            self.tensors = self._tensors(self._file.state[0])
        except BaseException:
            self.close()
            raise

    def read(self, name: str, dtype: np.dtype, index: tuple[slice, ...]) -> np.ndarray:
        """Read a tensor, or the part that an index selects; other rows of the first axis are not read."""
        stored = self.tensors[name]
        if not index:
            found = np.empty(stored.shape, dtype)
            self._file.fill(found, stored.begin)
            return found
        rows = range(*index[0].indices(stored.shape[0]))
        found = np.empty(tuple(len(range(*one.indices(n))) for one, n in _pairs(index, stored.shape)), dtype)
        row_bytes = dtype.itemsize * math.prod(stored.shape[1:])
        is_dense = rows.step == 1 and all(
            one.indices(n) == (0, n, 1) for one, n in zip(index[1:], stored.shape[1:], strict=False)
        )
        if is_dense:
            self._file.fill(found, stored.begin + rows.start * row_bytes)
        elif found.size:
            first, last = min(rows[0], rows[-1]), max(rows[0], rows[-1]) + 1
            num_rows = max(1, _CHUNK_BYTES // row_bytes) if rows.step == 1 else last - first
            for row in range(first, last, num_rows):
                chunk = np.empty((min(num_rows, last - row), *stored.shape[1:]), dtype)
                self._file.fill(chunk, stored.begin + row * row_bytes)
                if rows.step == 1:
                    found[row - first : row - first + len(chunk)] = chunk[(slice(None), *index[1:])]
                else:
                    found[:] = chunk[[one - first for one in rows]][(slice(None), *index[1:])]
        return found

    def _tensors(self, num_bytes: int) -> dict[str, _Stored]:
        """Parse the header, which must name every byte of the file once."""
        if num_bytes < _LENGTH_BYTES:
            raise self._not_whole(f"of {num_bytes} bytes")
        packed = np.empty(_LENGTH_BYTES, np.uint8)
        self._file.fill(packed, 0)
        length = int.from_bytes(packed.tobytes(), "little")
        data_begin = _LENGTH_BYTES + length
        if data_begin > num_bytes:
            raise self._not_whole(f"of {num_bytes} bytes, with a header of {length}")
        if length > self._max_header_bytes:
            raise self._not_whole(f"its header of {length} bytes is over the limit of {self._max_header_bytes}")
        packed = np.empty(length, np.uint8)
        self._file.fill(packed, _LENGTH_BYTES)
        try:
            header = json.loads(packed.tobytes(), object_pairs_hook=_unique)
            header.pop("__metadata__", None)
            found = {name: _stored(entry, data_begin) for name, entry in header.items()}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise self._not_whole(f"its header is malformed: {error}") from error
        end = data_begin
        for name, stored in sorted(found.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
            itemsize = FORMAT_DTYPES[stored.dtype].itemsize if stored.dtype in FORMAT_DTYPES else None
            if itemsize is not None and stored.num_bytes != itemsize * math.prod(stored.shape):
                raise self._not_whole(f"tensor {name} {list(stored.shape)} has {stored.num_bytes} bytes")
            if stored.begin != end:
                raise self._not_whole(f"tensor {name} begins at byte {stored.begin}, not at {end}")
            end += stored.num_bytes
        if end != num_bytes:
            raise self._not_whole(f"its tensors end at byte {end} of {num_bytes}")
        return found

    def _not_whole(self, problem: str) -> InvalidArgument:
        return unreadable(self._path, f"is not a complete safetensors file: {problem}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _stored(entry: Mapping[str, Any], data_begin: int) -> _Stored:
    begin, end = entry["data_offsets"]
    numbers = [begin, end, *entry["shape"]]
    if any(type(number) is not int or number < 0 for number in numbers) or end < begin:
        raise ValueError(f"shape {entry['shape']} at {entry['data_offsets']}")
    return _Stored(str(entry["dtype"]), tuple(entry["shape"]), data_begin + begin, end - begin)


def _pairs(index: tuple[slice, ...], shape: tuple[int, ...]) -> Iterator[tuple[slice, int]]:
    """Return a slice for each axis; axes that an index omits are complete."""
    return zip((*index, *[slice(None)] * (len(shape) - len(index))), shape, strict=True)


class TensorFiles:
    """Open checkpoint files as a `TensorSource`.

    A folder holds either one `model.safetensors`, which takes precedence, or the shards that
    `model.safetensors.index.json` names. Other files are ignored.

    Args:
        opened: closes the files.
        single: alternative name of the single file.
        max_header_bytes: limit of a file's header, which names its tensors.

    Raises:
        InvalidArgument: a file is missing or broken, changes while it is read, or the index and the shards disagree.
        Unsupported: the weights are only there in another format.
    """

    def __init__(
        self,
        folder: Path,
        opened: ExitStack,
        single: str = SINGLE_FILE,
        max_header_bytes: int = MAX_HEADER_BYTES,
    ) -> None:
        self._folder = folder
        self._max_header_bytes = max_header_bytes
        self._opened = opened
        self._files: dict[str, _TensorFile] = {}
        self._file_of: dict[str, str] = {}
        if (folder / single).is_file():
            self._open_file(single)
        elif (self._folder / INDEX_FILE).is_file():
            self._open_shards()
        elif dangling := next((path for path in map(folder.joinpath, (single, INDEX_FILE)) if path.is_symlink()), None):
            raise unreadable(dangling, "is missing")
        elif (folder / ORIGINAL_FILE).is_file():
            raise Unsupported(f"{folder}: {ORIGINAL_PROBLEM}")
        elif list(self._folder.glob("*.bin")) or list(self._folder.glob("*.pth")):
            raise Unsupported(f"{self._folder}: only safetensors weights are supported; convert the checkpoint")
        else:
            raise InvalidArgument(str(self._folder), f"has neither {SINGLE_FILE} nor {INDEX_FILE}")

    @property
    def names(self) -> frozenset[str]:
        """Every tensor of the checkpoint."""
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the file header."""
        return self._stored(name).shape

    def dtype(self, name: str) -> np.dtype:
        """Return the type of a tensor, from the file header. Raise Unsupported if not among `FORMAT_DTYPES`."""
        stored = self._stored(name).dtype
        if stored not in FORMAT_DTYPES:
            raise unsupported_dtype(self.where(name), name, stored)
        return FORMAT_DTYPES[stored]

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> np.ndarray:
        """See `TensorSource.read`; for a part nothing else is read from the file."""
        check_shape(self, name, shape)
        return self._files[self._file_of[name]].read(name, self.dtype(name), index)

    def where(self, name: str) -> Path:
        """Return the file that holds a tensor, or the folder if none does."""
        return self._folder / self._file_of[name] if name in self._file_of else self._folder

    def _stored(self, name: str) -> _Stored:
        return self._files[self._file_of[name]].tensors[name]

    def _open_file(self, file_name: str) -> None:
        path = self._folder / file_name
        if path.is_symlink() and not path.exists():
            raise unreadable(path, "is missing")
        if Path(file_name).name != file_name or not path.is_file():
            raise InvalidArgument(str(self._folder / INDEX_FILE), f"names {file_name!r}, which is not in the folder")
        file = _TensorFile(path, self._max_header_bytes)
        self._opened.callback(file.close)
        self._files[file_name] = file
        for name in file.tensors:
            if name in self._file_of:
                raise InvalidArgument(str(path), f"tensor {name} is also in {self._file_of[name]}")
            self._file_of[name] = file_name

    def _open_shards(self) -> None:
        path = self._folder / INDEX_FILE
        try:
            index = json.loads(read_bounded(path, MAX_INDEX_BYTES).decode("utf-8-sig"))["weight_map"]
            wanted = {str(name): str(file_name) for name, file_name in index.items()}
        except InvalidArgument:
            raise
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise unreadable(path, f"must be a JSON object with a weight_map: {error!r}") from error
        for file_name in sorted(set(wanted.values())):
            self._open_file(file_name)
        # As in transformers, the shards decide: an index may omit tensors, or name another shard.
        for name in sorted(wanted.keys() - self._file_of.keys()):
            raise InvalidArgument(str(path), f"puts tensor {name} into {wanted[name]}, but it is in no shard")


class ArrayTensors:
    """Arrays in memory as a `TensorSource`.

    Args:
        arrays: by Hugging Face's names, of which nested dictionaries have parts. They are NumPy's, JAX's, or others
            with DLPack in host memory, such as PyTorch's, which are viewed and not copied.

    Raises:
        InvalidArgument: a name occurs twice, or a value is no array, or is not in this process.
    """

    _FIELD = "weights"

    def __init__(self, arrays: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        self._arrays: dict[str, np.ndarray | jax.Array] = {}
        for name, array in self._named(arrays.items() if isinstance(arrays, Mapping) else arrays):
            if name in self._arrays:
                raise InvalidArgument(self._FIELD, f"tensor {name} occurs twice")
            self._arrays[name] = _view_array(self._FIELD, name, array)
            self._undeleted(name)

    def _named(self, pairs: Iterable[Any]) -> Iterator[tuple[str, Any]]:
        """Yield the arrays of nested dictionaries by their names, joined with dots."""
        for pair in pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
                raise InvalidArgument(self._FIELD, f"must be pairs of name and array, not {str(pair)[:80]}")
            name, value = pair
            if isinstance(value, Mapping):
                yield from ((f"{name}.{inner}", array) for inner, array in self._named(value.items()))
            else:
                yield name, value

    @property
    def names(self) -> frozenset[str]:
        """Every given tensor."""
        return frozenset(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._arrays[name].shape)

    def dtype(self, name: str) -> np.dtype:
        """Return the type of a tensor. Raise Unsupported if not among `ALL_DTYPES`."""
        dtype = np.dtype(self._arrays[name].dtype)
        if dtype.name not in ALL_DTYPES:
            raise unsupported_dtype(self.where(name), name, dtype.name)
        return dtype

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> np.ndarray:
        """See `TensorSource.read`; a JAX array is copied to the host, unless it is there."""
        check_shape(self, name, shape)
        self.dtype(name)
        return np.asarray(self._undeleted(name))[index]

    def where(self, name: str) -> Path:
        """Return the argument's name, for error messages."""
        return Path(self._FIELD)

    def on_device(self, names: Iterable[str]) -> list[jax.Array] | None:
        """Return the JAX arrays of these names; None if one is not a JAX array."""
        found = [array for name in names if isinstance(array := self._undeleted(name), jax.Array)]
        return found if len(found) == len(list(names)) else None

    def _undeleted(self, name: str) -> np.ndarray | jax.Array:
        """Return an array. Raise InvalidArgument if it was deleted or donated."""
        array = self._arrays[name]
        if isinstance(array, jax.Array) and array.is_deleted():
            raise InvalidArgument(self._FIELD, f"tensor {name} is a deleted or donated array")
        return array


def _view_array(field: str, name: str, given: Any) -> np.ndarray | jax.Array:
    """Return a NumPy or JAX array that has the memory of a given one.

    Raises:
        InvalidArgument: it is no array, or its memory is not accessible here.
    """
    if isinstance(given, jax.Array):
        if not given.is_fully_addressable:
            raise InvalidArgument(field, f"tensor {name} is not completely on devices of this process")
        return given
    if isinstance(given, np.ndarray):
        return given
    if getattr(given, "__dlpack__", None) is None:
        raise InvalidArgument(field, f"tensor {name} is a {type(given).__name__}, not an array")
    detach = getattr(given, "detach", None)  # PyTorch exports no tensor that requires a gradient
    tensor = given if detach is None else detach()
    try:
        return np.from_dlpack(tensor)
    except (TypeError, ValueError, RuntimeError, BufferError):  # NumPy lacks bfloat16
        try:
            return np.asarray(jax.dlpack.from_dlpack(tensor))
        except Exception as error:
            problem = f"tensor {name} is not accessible in host memory: {str(error)[:200]}"
            raise InvalidArgument(field, problem) from error


_FORMAT_NAMES = {dtype: name for name, dtype in FORMAT_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor to write. `read` creates it, once; it is dropped before the next one is read."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize


def write_tensor_files(tensors: Sequence[StoredTensor], folder: Path, max_shard_bytes: int) -> None:
    """Write `model.safetensors`, or shards and their index if one file would exceed the limit.

    Args:
        tensors: in the order in which they are assigned to files.
        folder: must exist.
        max_shard_bytes: limit for the tensors of one file; a larger tensor has a separate file.

    Raises:
        OSError: a file could not be written.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    by_name = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file_name, names in split.filename_to_tensors.items():
        _write_file([by_name[name] for name in names], folder / file_name)
    if split.is_sharded:
        metadata = {"total_parameters": sum(tensor.size for tensor in tensors), **split.metadata}
        index = {"metadata": metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        (folder / INDEX_FILE).write_text(json_text.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(tensors: Sequence[StoredTensor], path: Path) -> None:
    # Wide types first, as in the library: then every tensor is aligned to the size of the type.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    with path.open("wb") as file:
        file.write(_header(ordered))
        for tensor in ordered:
            array = np.ascontiguousarray(tensor.read())
            file.write(array.reshape(-1).view(np.uint8).data)
            del array


def _header(tensors: Sequence[StoredTensor]) -> bytes:
    entries: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        entries[tensor.name] = {
            "dtype": _FORMAT_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json_text.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
