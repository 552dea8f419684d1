"""The elements of a tensor: as raw bytes of the message, or in the typed field.

BYTES          each element after its length, 4 bytes little-endian
BOOL           a byte each
numbers        little-endian
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from jpaged._proto.open_inference import inference_pb2
from jpaged.errors import InvalidArgument

InputTensor = inference_pb2.ModelInferRequest.InferInputTensor
OutputTensor = inference_pb2.ModelInferResponse.InferOutputTensor

MAX_RANK = 8
_LENGTH = struct.Struct("<I")
_NUMBERS = {"BOOL": "?", "INT32": "<i4", "INT64": "<i8", "UINT32": "<u4", "FP32": "<f4"}
_TYPED_FIELDS = {
    "BOOL": "bool_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT32": "uint_contents",
    "FP32": "fp32_contents",
    "BYTES": "bytes_contents",
}


def elements_of(field: str, tensor: InputTensor, raw: bytes | None) -> Sequence[Any]:
    """Return the elements of a tensor, flat.

    Args:
        raw: its bytes; None if the elements are in the tensor.

    Raises:
        InvalidArgument: the number of elements contradicts the shape, or their type is wrong.
    """
    if len(tensor.shape) > MAX_RANK or any(length < 0 for length in tensor.shape):
        shown = list(tensor.shape[: MAX_RANK + 1])
        raise InvalidArgument(field, f"the shape {shown} must have at most {MAX_RANK} dimensions, none negative")
    num = math.prod(tensor.shape)
    found = _typed(field, tensor) if raw is None else _from_bytes(field, tensor.datatype, raw, num)
    if len(found) != num:
        raise InvalidArgument(field, f"has {len(found)} elements; its shape {list(tensor.shape)} requires {num}")
    return found


def _typed(field: str, tensor: InputTensor) -> Sequence[Any]:
    name = _TYPED_FIELDS[tensor.datatype]
    for given, _ in tensor.contents.ListFields():
        if given.name != name:
            raise InvalidArgument(f"{field}.contents.{given.name}", f"elements of {tensor.datatype} belong in {name}")
    found: Sequence[Any] = getattr(tensor.contents, name)
    return found


def _from_bytes(field: str, datatype: str, raw: bytes, num: int) -> Sequence[Any]:
    """Decode `num` elements; read at most one more than those."""
    if datatype == "BYTES":
        return _byte_strings(field, raw, num)
    size = np.dtype(_NUMBERS[datatype]).itemsize
    if len(raw) % size:
        raise InvalidArgument(field, f"{len(raw)} bytes are not a multiple of {size}, the size of {datatype}")
    if datatype == "BOOL" and raw.strip(b"\0\1"):
        raise InvalidArgument(field, "has a byte that is neither 0 nor 1")
    found: list[Any] = np.frombuffer(raw, _NUMBERS[datatype]).tolist()
    return found


def _byte_strings(field: str, raw: bytes, num: int) -> list[bytes]:
    found: list[bytes] = []
    place = 0
    while place < len(raw) and len(found) <= num:
        begin = place + _LENGTH.size
        if begin > len(raw):
            raise InvalidArgument(field, f"ends within the length of an element, at byte {place}")
        place = begin + _LENGTH.unpack_from(raw, begin - _LENGTH.size)[0]
        if place > len(raw):
            raise InvalidArgument(field, f"ends within an element: {place} bytes are declared, {len(raw)} are present")
        found.append(raw[begin:place])
    return found


def add_output(
    response: inference_pb2.ModelInferResponse, name: str, datatype: str, elements: Sequence[Any], *, is_typed: bool
) -> None:
    """Append a one-dimensional tensor to a response; `is_typed` selects the typed field instead of raw bytes."""
    tensor = OutputTensor(name=name, datatype=datatype, shape=[len(elements)])
    if is_typed:
        getattr(tensor.contents, _TYPED_FIELDS[datatype]).extend(elements)
    elif datatype == "BYTES":
        response.raw_output_contents.append(b"".join(_LENGTH.pack(len(one)) + one for one in elements))
    else:
        response.raw_output_contents.append(np.asarray(elements, _NUMBERS[datatype]).tobytes())
    response.outputs.append(tensor)
