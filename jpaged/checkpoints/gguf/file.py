"""A GGUF file: metadata and tensor locations.

Only its header is read here. A model in several parts (`NAME-00001-of-00003.gguf`) is named by its first part.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.checkpoints.gguf.blocks import BLOCK_TYPES, FLOATS, READ
from jpaged.checkpoints.tensor_files import MAX_HEADER_BYTES, StableFile
from jpaged.errors import InvalidArgument, Unsupported

SUFFIX = ".gguf"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
NO_MODELS = ("mmproj", "imatrix")
"""Prefixes or types of files published with models: multimodal projectors and importance matrices."""
_REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"} | {
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Types removed from llama.cpp, by number."""
_MAGIC = b"GGUF"
_VERSION_BYTES, _VERSIONS = 4, (2, 3)
_ALIGNMENT = 32
"""Alignment of the data, and with it of offsets, if the metadata has none."""
_MAX_SHOWN = 80
_MAX_AXES = 4
"""Limit of the format for the axes of a tensor."""
_FIRST_BYTES = 1 << 20
"""Bytes of a header that are read at first; vocabularies make it 2 to 16 MiB."""
_NUMBERS = {
    number: struct.Struct(f"<{code}")
    for number, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_STRING, _ARRAY = 8, 9
"""Types of values in the metadata, by number."""
_UINT32, _UINT64 = _NUMBERS[4], _NUMBERS[10]
_PLAIN, _BF16 = {0: "F32", 1: "F16"}, 30
_BLOCKS = {
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
"""Types of tensors that need no import, by number."""
_WHOLE = {"F64": np.float64, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}
"""Types of tensors that are stored as numbers, except those above."""
_UNREADABLE = (OSError, ValueError, LookupError, OverflowError, TypeError)
"""Errors of parsing, and of the package's enumerations."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
        kind: type as in llama.cpp: F32, Q4_K.
        shape: of the weights, the contracted axis last.
        stored_shape: shape of the array in the file: in numbers for F16, F32 and F64; otherwise in bytes of a row along
            the last axis.
        dtype: dtype of that array.
        path: the file that holds it.
        begin: offset of the bytes in the file.
        state: size and modification time that the file must still have.
    """

    kind: str
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    dtype: np.dtype
    path: Path
    begin: int
    state: tuple[int, int]

    def read(self, expert: int | None = None) -> np.ndarray:
        """Read the array in the file, or the part of one of stacked experts.

        Raises:
            InvalidArgument: the file has changed since it was opened.
        """
        found = np.empty(self.stored_shape if expert is None else self.stored_shape[1:], self.dtype)
        file = StableFile(self.path, self.state)
        try:
            file.fill(found, self.begin + (expert or 0) * found.nbytes)
        finally:
            file.close()
        return found


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A model in GGUF.

    Attributes:
        path: of the first part.
        metadata: of the first part; arrays as lists.
        tensors: of all parts, by name.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """Name of the architecture in llama.cpp.

        Raises:
            InvalidArgument: the file has none.
        """
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise InvalidArgument(str(self.path), f"general.architecture is {name!r}; it must be a string")
        return name


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF model at a path: a file, its first part, or the one in a folder; None if there is none.

    Raises:
        InvalidArgument: a folder holds several.
    """
    if path.is_file() and path.suffix == SUFFIX:
        return _first_part(path)
    if not path.is_dir():
        return None
    files = [file for file in path.glob(f"*{SUFFIX}") if not file.name.startswith(NO_MODELS)]
    models = sorted({_first_part(file) for file in files})
    if len(models) > 1:
        models = [model for model in models if _is_model(model)]
    if len(models) > 1:
        listed = ", ".join(model.name for model in models)
        raise InvalidArgument("model", f"folder {path} has {len(models)} GGUF models: choose one of {listed}")
    return models[0] if models else None


def _is_model(path: Path) -> bool:
    """Return False if a file declares that it is no model; a broken file raises an error when it is opened."""
    try:
        metadata = open_gguf(path).metadata
    except (InvalidArgument, Unsupported):
        return True
    return metadata.get("general.type") not in NO_MODELS and metadata.get("general.architecture") != "clip"


def is_gguf(path: Path) -> bool:
    """Return True if a checkpoint path, as returned by `find_gguf`, is a GGUF file."""
    return path.suffix == SUFFIX and not path.is_dir()


def get_parts(path: Path) -> list[Path]:
    """Return the files of a model, given its first part."""
    match = _PART.search(path.name)
    if match is None:
        return [path]
    begin, total = path.name[: match.start()], match[2]
    return [path.with_name(f"{begin}-{number:05d}-of-{total}{SUFFIX}") for number in range(1, int(total) + 1)]


def open_gguf(path: Path) -> GgufFile:
    """Read the headers of a model's files; they are parsed once while they do not change.

    Raises:
        InvalidArgument: a part is missing, truncated or damaged, or changes while it is read.
        Unsupported: a tensor has an unknown type.
    """
    parts = get_parts(path)
    for part in parts:
        if not part.is_file():
            raise InvalidArgument(str(path), f"is a model in {len(parts)} parts, but {part.name} is missing")
    return _open(path, tuple((part, part.stat().st_size, part.stat().st_mtime_ns) for part in parts))


@functools.lru_cache(maxsize=2)
def _open(path: Path, parts: tuple[tuple[Path, int, int], ...]) -> GgufFile:
    metadata: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for index, (part, *state) in enumerate(parts):
        found, inside = _read(part, (state[0], state[1]))
        metadata = metadata or found
        for name, tensor in inside.items():
            if name in tensors:
                raise InvalidArgument(str(part), f"tensor {name} is also in {tensors[name].path.name}")
            tensors[name] = tensor
        number = found.get("split.no", 0)
        if number != index:
            given = number + 1 if type(number) is int else f"{number!r:.{_MAX_SHOWN}}"
            raise InvalidArgument(str(part), f"is part {given} by its metadata, but part {index + 1} by its name")
    count = metadata.get("split.tensors.count", len(tensors))
    if count != len(tensors):
        raise InvalidArgument(
            str(path),
            f"has {len(tensors)} tensors in {len(parts)} parts; its metadata requires {count!r:.{_MAX_SHOWN}}",
        )
    return GgufFile(path, metadata, tensors)


def _read(path: Path, state: tuple[int, int]) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    file = StableFile(path, state)
    try:
        return _Reader(path, file).read()
    except InvalidArgument:
        raise
    except _UNREADABLE as error:
        raise InvalidArgument(str(path), _unreadable(path)) from error
    finally:
        file.close()


def _unreadable(path: Path) -> str:
    """Return why the package's reader, whose errors name arrays and enumerations, could not read a file."""
    with path.open("rb") as file:
        if not _MAGIC.startswith(magic := file.read(len(_MAGIC))):
            return f"is not a GGUF file: it begins with {magic!r} instead of {_MAGIC!r}"
        version = int.from_bytes(file.read(_VERSION_BYTES), "little")
    if version not in _VERSIONS and magic == _MAGIC and version & 0xFFFF:
        versions = " and ".join(map(str, _VERSIONS))
        return f"is a GGUF file of version {version}; supported versions: {versions}; convert the model again"
    return f"is not a complete GGUF file: its {path.stat().st_size} bytes are truncated or damaged; download it again"


class _Header:
    """The beginning of a file, in memory as far as it is needed.

    Raises:
        InvalidArgument: the file changes, or more than the limit is needed.
    """

    def __init__(self, path: Path, file: StableFile) -> None:
        self._path, self._file, self.num_file_bytes = path, file, file.state[0]
        self._data = b""

    def until(self, end: int) -> bytes:
        """Return the bytes of the file up to `end` at least.

        Raises:
            ValueError: the file is shorter.
        """
        if end > self.num_file_bytes:
            raise ValueError("ends in the header")
        if end > MAX_HEADER_BYTES:
            raise InvalidArgument(
                str(self._path), f"its header is damaged, or over the limit of {MAX_HEADER_BYTES} bytes"
            )
        if end > len(self._data):
            most = min(self.num_file_bytes, MAX_HEADER_BYTES)
            data = np.empty(min(most, max(end, 2 * len(self._data), _FIRST_BYTES)), np.uint8)
            self._file.fill(data, 0)
            self._data = data.tobytes()
        return self._data


class _Reader:
    """Parser of a header: fields one after the other, then the places of the tensors.

    The package's reader maps the file, so that a page of a truncated file ends the process. It parses a vocabulary
    number by number, in 7 s, and takes a tenth of a second to import.
    """

    def __init__(self, path: Path, file: StableFile) -> None:
        self._path, self._state = path, file.state
        self._header, self._at = _Header(path, file), 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """Return metadata and tensors.

        Raises:
            InvalidArgument: the byte order is not this machine's, or a limit is exceeded.
            Unsupported: a tensor has an unknown type.
            ValueError, LookupError: the file is not a complete GGUF file.
        """
        if self._take(len(_MAGIC)) != _MAGIC:
            raise ValueError("has another magic number")
        version = self._number(_UINT32)
        if not version & 0xFFFF:
            raise InvalidArgument(str(self._path), "has the wrong byte order for this machine; convert the model again")
        if version not in _VERSIONS:
            raise ValueError("has another version")
        num_tensors, num_fields = self._number(_UINT64), self._number(_UINT64)
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._text()
            if name in metadata:
                raise ValueError("has a field twice")
            metadata[name] = self._value(self._number(_UINT32))
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment.bit_count() != 1:
            raise ValueError("has an alignment that is no power of two")
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, number, offset in found:
            if name in tensors:
                raise ValueError("has a tensor twice")
            tensors[name] = self._placed(name, shape, number, begin + offset)
        return metadata, tensors

    def _take(self, num_bytes: int) -> bytes:
        begin, self._at = self._at, self._at + num_bytes
        return self._header.until(self._at)[begin : self._at]

    def _number(self, kind: struct.Struct) -> Any:
        return kind.unpack(self._take(kind.size))[0]

    def _text(self) -> str:
        return self._take(self._number(_UINT64)).decode()

    def _value(self, kind: int) -> Any:
        """Return a value; a single float32 as its shortest decimal, as in configs."""
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            value = self._number(_NUMBERS[kind])
            return float(str(np.float32(value))) if _NUMBERS[kind].format == "<f" else value
        inner, count = self._number(_UINT32), self._number(_UINT64)
        if inner == _STRING:
            return self._texts(count)
        dtype = np.dtype(_NUMBERS[inner].format)
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()

    def _texts(self, count: int) -> list[str]:
        texts, at, data = [], self._at, self._header.until(self._at)
        known, length_of = len(data), _UINT64.unpack_from
        for _ in range(count):
            begin = at + 8
            if begin > known:
                data = self._header.until(begin)
                known = len(data)
            at = begin + length_of(data, at)[0]
            if at > known:
                data = self._header.until(at)
                known = len(data)
            texts.append(data[begin:at].decode())
        self._at = at
        return texts

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, shape with the contracted axis last, number of the type, and offset in the data."""
        name, num_axes = self._text(), self._number(_UINT32)
        if not 1 <= num_axes <= _MAX_AXES:
            problem = f"tensor {name:.{_MAX_SHOWN}} has {num_axes} axes; it must have 1 to {_MAX_AXES}"
            raise InvalidArgument(str(self._path), problem)
        shape = tuple(self._number(_UINT64) for _ in range(num_axes))[::-1]
        if not all(shape):
            problem = f"tensor {name:.{_MAX_SHOWN}} has shape {list(shape)}; every axis must be above 0"
            raise InvalidArgument(str(self._path), problem)
        return name, shape, self._number(_UINT32), self._number(_UINT64)

    def _placed(self, name: str, shape: tuple[int, ...], number: int, begin: int) -> GgufTensor:
        kind, dtype, size, num_bytes = self._type(name, number)
        stored = shape
        if dtype == np.uint8:
            if shape[-1] % size:
                raise ValueError("has a part of a block")
            stored = (*shape[:-1], shape[-1] // size * num_bytes)
        if begin + math.prod(stored) * dtype.itemsize > self._header.num_file_bytes:
            raise ValueError("ends in a tensor")
        return GgufTensor(kind, shape, stored, dtype, self._path, begin, self._state)

    def _type(self, name: str, number: int) -> tuple[str, np.dtype, int, int]:
        """Return name, dtype of the array in the file, and for uint8 numbers and bytes of a block."""
        if number in _PLAIN:
            kind = _PLAIN[number]
            return kind, FLOATS[kind], 1, FLOATS[kind].itemsize
        if number in _BLOCKS:
            block = BLOCK_TYPES[_BLOCKS[number]]
            return _BLOCKS[number], np.dtype(np.uint8), block.size, block.num_bytes
        if number == _BF16:
            return "BF16", np.dtype(np.uint8), 1, 2
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # takes a tenth of a second

        if number not in {kind.value for kind in GGMLQuantizationType}:
            kind = f"type {number} ({_REMOVED.get(number, 'unknown')})"
            raise Unsupported(
                f"{self._path}: tensor {name} has unsupported {kind}; supported GGUF types: {', '.join(READ)}"
            )
        found = GGMLQuantizationType(number)
        return found.name, np.dtype(_WHOLE.get(found.name, np.uint8)), *GGML_QUANT_SIZES[found]


def _first_part(path: Path) -> Path:
    match = _PART.search(path.name)
    return path if match is None else path.with_name(f"{path.name[: match.start()]}-00001-of-{match[2]}{SUFFIX}")
