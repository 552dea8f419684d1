"""A GGUF file: metadata and tensor locations.

The `gguf` package reads it. A model in several parts (`NAME-00001-of-00003.gguf`) is named by its first part.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.checkpoints.gguf.blocks import READ
from jpaged.checkpoints.tensor_files import MAX_HEADER_BYTES, StableFile
from jpaged.errors import InvalidArgument, Unsupported

SUFFIX = ".gguf"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_NO_MODELS = ("mmproj", "imatrix")
"""Prefixes or types of files published with models: multimodal projectors and importance matrices."""
_REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"} | {
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Types removed from llama.cpp, by number."""
_MAGIC = b"GGUF"
_VERSION_BYTES, _VERSIONS = 4, (2, 3)
_FIRST_BYTES = 1 << 20
"""Bytes of a header that are read at first; vocabularies make it 2 to 16 MiB."""
_UNREADABLE = (OSError, ValueError, LookupError, OverflowError, TypeError)
"""Errors of the package, which has no error class."""


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
    files = [file for file in path.glob(f"*{SUFFIX}") if not file.name.startswith(_NO_MODELS)]
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
    return metadata.get("general.type") not in _NO_MODELS and metadata.get("general.architecture") != "clip"


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
            raise InvalidArgument(str(part), f"is part {number + 1} by its metadata, but part {index + 1} by its name")
    count = metadata.get("split.tensors.count", len(tensors))
    if count != len(tensors):
        raise InvalidArgument(
            str(path), f"has {len(tensors)} tensors in {len(parts)} parts; its metadata requires {count}"
        )
    return GgufFile(path, metadata, tensors)


def _read(path: Path, state: tuple[int, int]) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    file = StableFile(path, state)
    try:
        reader = _reader()(path, _Header(path, file))
        metadata = {name: _value(field) for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        tensors = {
            tensor.name: GgufTensor(
                tensor.tensor_type.name,
                tuple(int(n) for n in reversed(tensor.shape)),
                tensor.data.shape,
                tensor.data.dtype,
                path,
                int(tensor.data_offset),
                state,
            )
            for tensor in reader.tensors
        }
    except InvalidArgument:
        raise
    except _UNREADABLE as error:
        raise InvalidArgument(str(path), _unreadable(path)) from error
    finally:
        file.close()
    if getattr(reader, "byte_order", "I") != "I":
        raise InvalidArgument(str(path), "has the wrong byte order for this machine; convert the model again")
    return metadata, tensors


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
        self._data = np.empty(0, np.uint8)

    def until(self, end: int) -> np.ndarray:
        """Return the bytes of the file up to `end` at least, or all if it is shorter."""
        end = min(end, self.num_file_bytes)
        if end > MAX_HEADER_BYTES:
            raise InvalidArgument(
                str(self._path), f"its header is damaged, or over the limit of {MAX_HEADER_BYTES} bytes"
            )
        if end > len(self._data):
            most = min(self.num_file_bytes, MAX_HEADER_BYTES)
            data = np.empty(min(most, max(end, 2 * len(self._data), _FIRST_BYTES)), np.uint8)
            self._file.fill(data, 0)
            self._data = data
        return self._data


@functools.cache
def _reader() -> Any:
    """Return the package's reader with fast array parsing and without access to the file that it maps.

    A vocabulary takes the package 7 s, number by number; a mapped page of a truncated file ends the process.
    """
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType  # takes a tenth of a second

    known = {kind.value for kind in GGMLQuantizationType}

    class Reader(GGUFReader):
        def __init__(self, path: Path, header: _Header) -> None:
            self._path, self._header = path, header
            self._is_in_header = True
            super().__init__(path)

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> np.ndarray:
            kind, begin = np.dtype(dtype).newbyteorder(override_order or self.byte_order), int(offset)
            count, end = int(count), begin + kind.itemsize * int(count)
            if self._is_in_header:
                return self._header.until(end)[begin:end].view(kind)
            if end > self._header.num_file_bytes:
                raise ValueError("ends in a tensor")
            return np.broadcast_to(np.zeros((), kind), (count,))  # for its shape and type

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            self._is_in_header = False
            for field in fields:
                _, name, _, _, (number,), _ = field.parts
                if number not in known:
                    kind = f"type {number} ({_REMOVED.get(int(number), 'unknown')})"
                    raise Unsupported(
                        f"{self._path}: tensor {bytes(name).decode()} has unsupported {kind}; supported GGUF types: "
                        f"{', '.join(READ)}"
                    )
            super()._build_tensors(start_offs, fields)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
                found: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
                return found
            inner = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
            count, begin = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
            kinds = [GGUFValueType.ARRAY, inner]
            if inner != GGUFValueType.STRING:
                numbers = self._get(begin, self.gguf_scalar_to_np[inner], count)
                if len(numbers) != count:
                    raise ValueError("ends in an array")
                return 12 + numbers.nbytes, [numbers], [0], kinds
            # Slices of bytes: those of an array take ten times as long, and a vocabulary has 100,000.
            data, strings, at = self._header.until(begin).tobytes(), [], begin
            for _ in range(count):
                if at + 8 > len(data):
                    data = self._header.until(at + 8).tobytes()
                length = int.from_bytes(data[at : at + 8], "little")
                at += 8
                if at + length > len(data):
                    data = self._header.until(at + length).tobytes()
                strings.append(data[at : at + length])
                at += length
                if at > len(data):
                    raise ValueError("ends in an array of texts")
            return at - orig_offs, strings, list(range(count)), kinds

    return Reader


def _value(field: Any) -> Any:
    """Return a field's value; a single float32 as its shortest decimal, as in configs."""
    kinds = [kind.name for kind in field.types]
    if kinds == ["ARRAY", "STRING"]:
        return [str(part, "utf-8") for part in (field.parts[index] for index in field.data)]
    value = field.contents()
    return float(str(np.float32(value))) if kinds == ["FLOAT32"] else value


def _first_part(path: Path) -> Path:
    match = _PART.search(path.name)
    return path if match is None else path.with_name(f"{path.name[: match.start()]}-00001-of-{match[2]}{SUFFIX}")
