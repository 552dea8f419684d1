"""Input embeddings of a prompt as callers send them -> checked numbers, with digests for the prefix cache.

A file of `torch.save` is read without torch, and nothing in it is executed. It is a ZIP archive of stored files:

    archive/data.pkl     a pickle that describes the tensor    interpreted here, with the opcodes that torch writes
    archive/byteorder    "little", in newer files
    archive/data/0       the numbers of the tensor's storage   read only if the description fits the model

The pickle can name a few functions and types of torch, each with a meaning here. Any other name is an error.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import pickletools
import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import Geometry
from jpaged.errors import InvalidArgument, RequestTooLong, Unsupported
from jpaged.types import EMBED_TYPES, EmbeddedSpan, GivenEmbeds, PromptEmbeds, widen_bfloat16

FIELD = "prompt_embeds"
_MAX_PICKLE_BYTES = 1 << 12
_MAX_OTHER_BYTES = 1 << 16
"""Bytes of a file that are not numbers: names, checksums and the description."""
_WIDEST = 8
_SHOWN_CHARS = 80
_STORAGES = {
    "torch FloatStorage": "float32",
    "torch BFloat16Storage": "bfloat16",
    "torch HalfStorage": "float16",
    "torch DoubleStorage": "float64",
}
_DAMAGED = (
    *(zipfile.BadZipFile, struct.error, AttributeError, ArithmeticError, EOFError, LookupError, OSError),
    *(RuntimeError, TypeError, ValueError),
)
"""Errors that a damaged or hostile file causes in `zipfile`, `pickletools` and here."""
_TENSOR, _PARAMETER, _DICT = (
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "collections OrderedDict",
)
_KNOWN = frozenset({*_STORAGES, _TENSOR, _PARAMETER, _DICT})


def read_embeds(given: GivenEmbeds, geometry: Geometry) -> NDArray[np.float32]:
    """Return the embeddings of a prompt as float32 `[tokens, width]`; a copy.

    Args:
        given: an array, or a file of `torch.save`, or its base64 text.

    Raises:
        InvalidArgument: they are not readable, or of another type or shape than the model takes.
        RequestTooLong: there are more tokens than a sequence has.
        Unsupported: the model was loaded without the option.
    """
    if not geometry.embed_width or not geometry.has_prompt_embeds:
        option = "without --enable-prompt-embeds (enable_prompt_embeds=True of LLM)"
        raise Unsupported(f"{FIELD}: the model was loaded {option}")
    if not isinstance(given, str | bytes):
        _check_shape(given.shape, geometry)
        return _to_float32(given).reshape(-1, geometry.embed_width)
    most = geometry.max_model_len * geometry.embed_width * _WIDEST + _MAX_OTHER_BYTES
    size = len(given) * 3 // 4 if isinstance(given, str) else len(given)
    if size > most:
        limit = f"{size} bytes, over the limit of {most} for max_model_len ({geometry.max_model_len}) tokens"
        raise RequestTooLong(FIELD, f"{limit}: save a clone() of a part of a larger tensor")
    if isinstance(given, bytes):
        return _read_torch_file(given, geometry)
    try:
        content = base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(FIELD, f"is not base64: {error}") from error
    return _read_torch_file(content, geometry)


def check_finite(values_te: NDArray[np.float32], geometry: Geometry) -> None:
    """Raise InvalidArgument for a number that the model's type does not hold."""
    is_wrong_te = ~(np.abs(values_te) <= geometry.embed_max)
    if is_wrong_te.any():
        row, column = (int(place) for place in np.argwhere(is_wrong_te)[0])
        found = float(values_te[row, column])
        raise InvalidArgument(
            FIELD, f"has {found:g} at [{row}, {column}]: numbers must be finite, up to {geometry.embed_max:g}"
        )


def with_digests(spans: Sequence[EmbeddedSpan], num_tokens: int, block_size: int) -> PromptEmbeds:
    """Return the embeddings of a prompt of this length, and a digest for each block.

    Rows of an image are known by the image's digest, so that they need not exist yet.
    """
    found: dict[int, Any] = {}
    for span in spans:
        for block in range(span.start // block_size, -(-span.stop // block_size)):
            digest = found.setdefault(block, hashlib.sha256(b"jpaged/embeds/1\0"))
            start = block * block_size
            position, end = max(start, span.start), min(start + block_size, span.stop)
            first = position - span.start
            head = [
                position - start,
                end - position,
                span.values_te.shape[1],
                bool(span.digest),
                span.first_row + first,
            ]
            digest.update(np.array(head, "<i8").tobytes())
            if span.digest:
                digest.update(span.digest)
            else:
                rows_te = span.values_te[first : first + end - position]
                digest.update(np.ascontiguousarray(rows_te, "<f4").tobytes())
    num_blocks = -(-num_tokens // block_size)
    digests = (found[block].digest() if block in found else b"" for block in range(num_blocks))
    return PromptEmbeds(tuple(spans), tuple(digests))


def _check_shape(shape: Sequence[int], geometry: Geometry) -> None:
    """Check a shape `[tokens, width]`, or `[1, tokens, width]` as transformers has it."""
    width, most = geometry.embed_width, geometry.max_model_len
    sizes = tuple(shape[1:]) if len(shape) == 3 and shape[0] == 1 else tuple(shape)
    if len(sizes) != 2 or sizes[1] != width:
        shown = str(tuple(shape))[:_SHOWN_CHARS]
        raise InvalidArgument(FIELD, f"has the shape {shown}; the model takes (tokens, {width})")
    if not sizes[0]:
        raise InvalidArgument(FIELD, "is empty: at least one token is needed")
    if sizes[0] > most:
        raise RequestTooLong(FIELD, f"{sizes[0]} tokens are over max_model_len ({most})")


def _to_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    name = array.dtype.name
    if name == "bfloat16":
        array = widen_bfloat16(array.view(np.uint16))
    elif name not in EMBED_TYPES:
        raise InvalidArgument(FIELD, f"has the type {name}; must be one of {', '.join(EMBED_TYPES)}")
    with np.errstate(over="ignore"):  # infinite numbers are rejected
        return np.array(array, np.float32, order="C")  # a copy: the caller may change its array


@dataclass(frozen=True, slots=True)
class _StorageName:
    """A storage that a pickle refers to: its file, and its numbers."""

    key: str
    dtype: str
    num_items: int


@dataclass(frozen=True, slots=True)
class _TorchTensor:
    """A tensor as a pickle describes it: a strided view of a storage."""

    storage: _StorageName
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _TorchName:
    """A function or type that a pickle refers to."""

    name: str


def _read_torch_file(content: bytes, geometry: Geometry) -> NDArray[np.float32]:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return _read_archive(archive, geometry)
    except InvalidArgument:
        raise
    except _DAMAGED as error:
        problem = f"is not a file of torch.save (with torch 1.6 or later): {str(error)[:_SHOWN_CHARS]}"
        raise InvalidArgument(FIELD, problem) from error


def _read_archive(archive: zipfile.ZipFile, geometry: Geometry) -> NDArray[np.float32]:
    found = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(found) != 1:
        raise ValueError(f"it has {len(found)} descriptions of a tensor")
    root = found[0].removesuffix("data.pkl")
    if f"{root}byteorder" in archive.namelist() and _read(archive, f"{root}byteorder", 16) != b"little":
        raise ValueError("its numbers are not little-endian")
    tensor = _TensorPickle(_read(archive, found[0], _MAX_PICKLE_BYTES)).read()
    _check_shape(tensor.shape, geometry)
    storage = tensor.storage
    item_bytes, num_items = EMBED_TYPES[storage.dtype], storage.num_items
    last = tensor.offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    if tensor.offset < 0 or min(tensor.strides) < 0 or last >= num_items:
        raise ValueError("its tensor is not within its storage")
    content = _read(archive, f"{root}data/{storage.key}", num_items * item_bytes)
    if len(content) != num_items * item_bytes:
        raise ValueError(f"its storage has {len(content)} bytes, not {num_items * item_bytes}")
    form = "<u2" if storage.dtype == "bfloat16" else f"<f{item_bytes}"
    items = np.frombuffer(content, form)[tensor.offset :]
    strides = tuple(stride * item_bytes for stride in tensor.strides)
    values = np.lib.stride_tricks.as_strided(items, tensor.shape, strides, writeable=False)
    values = widen_bfloat16(values) if storage.dtype == "bfloat16" else values
    return _to_float32(values).reshape(-1, geometry.embed_width)


def _read(archive: zipfile.ZipFile, name: str, max_bytes: int) -> bytes:
    """Return a stored file of an archive; a compressed one could be larger than what was sent."""
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
        raise ValueError(f"{name[:_SHOWN_CHARS]} is compressed")
    if entry.file_size > max_bytes:
        raise ValueError(f"{name[:_SHOWN_CHARS]} has {entry.file_size} bytes, over the limit of {max_bytes}")
    return archive.read(entry)


class _TensorPickle:
    """Interpreter of the pickle of one tensor. It calls nothing and imports nothing that the pickle names.

    Args:
        content: the pickle, of a bounded size.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def read(self) -> _TorchTensor:
        """Return the tensor.

        Raises:
            ValueError: the pickle is damaged, or has something else than a tensor.
        """
        for opcode, argument, _ in pickletools.genops(self._content):
            if opcode.name == "STOP":
                break
            self._step(opcode.name, argument)
        if len(self._stack) != 1 or not isinstance(self._stack[0], _TorchTensor):
            raise ValueError("it has something else than one tensor")
        return self._stack[0]

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            stack.append(argument)
        elif name in ("PROTO", "FRAME"):
            return
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name in _TUPLES:
            begin = self._marks.pop() if name == "TUPLE" else len(stack) - _TUPLES[name]
            stack[begin:] = [tuple(stack[begin:])]
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "GLOBAL":
            stack.append(_known_name(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            stack[-2:] = [_known_name(*stack[-2:])]
        elif name == "BINPERSID":
            stack.append(_storage_from(stack.pop()))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(_call(stack.pop(), arguments))
        else:
            raise ValueError(f"its pickle has the operation {name}, which a tensor does not need")


_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "EMPTY_DICT": None}
_LITERALS = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"})
_TUPLES = {"TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _known_name(module: Any, attribute: Any) -> _TorchName:
    if not isinstance(module, str) or not isinstance(attribute, str):  # a tuple's text may be exponentially long
        raise ValueError("its pickle names something else than a text")
    name = f"{module} {attribute}"
    if name not in _KNOWN:
        raise ValueError(f"its pickle names {name[:_SHOWN_CHARS]!r}; only a dense tensor of floats is accepted")
    return _TorchName(name)


def _storage_from(reference: Any) -> _StorageName:
    kind, storage, key, _, num_items = reference
    if kind != "storage" or not isinstance(key, str) or not key.isalnum() or not _is_size(num_items):
        raise ValueError("its pickle refers to something else than a storage")
    return _StorageName(key, _STORAGES[storage.name], num_items)


def _call(function: Any, arguments: Any) -> Any:
    """Return the meaning of a function of torch for its arguments."""
    meaning = _MEANINGS[function.name]
    return meaning(*arguments)


def _tensor_from(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _TorchTensor:
    is_sound = isinstance(storage, _StorageName) and len(shape) == len(strides)
    if not is_sound or not all(map(_is_size, (offset, *shape, *strides))):
        raise ValueError("its tensor has no valid shape")
    return _TorchTensor(storage, offset, tuple(shape), tuple(strides))


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


_MEANINGS: dict[str, Callable[..., Any]] = {
    _TENSOR: _tensor_from,
    _PARAMETER: lambda tensor, *_: tensor,
    _DICT: lambda: None,
}
