"""Weights that a client sends: what a safetensors file may be, and what is refused before memory is allocated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save

from jpaged.errors import InvalidArgument
from jpaged.service.loaded_model import WeightUpload

WEIGHTS: dict[str, NDArray[Any]] = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array(5, np.int64),
    "c": np.zeros((0, 4), np.float16),
    "d": np.arange(5).astype(ml_dtypes.bfloat16),
}


class Checked:
    """What a model is asked to check."""

    def __init__(self, error: Exception | None = None) -> None:
        self.given: list[dict[str, tuple[str, tuple[int, ...]]]] = []
        self._error = error

    def __call__(self, weights: Mapping[str, NDArray[Any]]) -> None:
        self.given.append({name: (array.dtype.name, array.shape) for name, array in weights.items()})
        if self._error is not None:
            raise self._error


def file_of(header: Mapping[str, Any] | str, data: bytes = b"") -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


def assert_equal(got: Mapping[str, NDArray[Any]]) -> None:
    assert got.keys() == WEIGHTS.keys()
    for name, want in WEIGHTS.items():
        assert (got[name].dtype, got[name].shape) == (want.dtype, want.shape)
        np.testing.assert_array_equal(got[name], want)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 50, 10_000])
def test_parts_of_any_size(size: int) -> None:
    check, content = Checked(), save(WEIGHTS, {"format": "np"})
    upload = WeightUpload(check)
    for begin in range(0, len(content), size):
        with pytest.raises(InvalidArgument, match=f"data: ends after {begin}"):
            upload.arrays()
        upload.write(content[begin : begin + size])
    assert upload.num_bytes == len(content)
    assert_equal(upload.arrays())
    assert check.given == [{name: (array.dtype.name, array.shape) for name, array in WEIGHTS.items()}]


def test_repeated_parts_are_skipped_and_gaps_refused() -> None:
    content = save(WEIGHTS)
    upload = WeightUpload(Checked())
    for begin in range(0, len(content), 20):
        for _ in range(2):
            upload.write(content[begin : begin + 20], begin)
        with pytest.raises(InvalidArgument, match=f"offset: {len(content) + 1} is over the {upload.num_bytes} bytes"):
            upload.write(b"x", len(content) + 1)
    assert_equal(upload.arrays())
    with pytest.raises(InvalidArgument, match=f"data: {len(content) + 1} bytes are over the {len(content)}"):
        upload.write(b"x")


def test_the_model_refuses_before_data_is_read() -> None:
    """A header of 4 TB takes no memory."""
    huge = {"a": {"dtype": "F32", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 4 << 40]}}
    check = Checked(InvalidArgument("weights", "tensor a is too large"))
    with pytest.raises(InvalidArgument, match="tensor a is too large"):
        WeightUpload(check).write(file_of(huge))
    assert check.given == [{"a": ("float32", (1 << 20, 1 << 20))}]


def test_data_for_which_there_is_no_memory() -> None:
    """Tensors that a model ignores may have any size."""
    huge = {"a": {"dtype": "U8", "shape": [(1 << 48) - 1], "data_offsets": [0, (1 << 48) - 1]}}
    with pytest.raises(InvalidArgument, match="data: has 281474976710655 bytes, more than this machine has memory for"):
        WeightUpload(Checked()).write(file_of(huge))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\0" * 8, "has a header of 0 bytes"),
        (b"\xff" * 8, "has a header of 18446744073709551615 bytes, not of 2 to"),
        (file_of("nonsense"), "has a header that is no JSON"),
        (file_of("[]"), "has a header that is no JSON object"),
        (file_of({"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}), "tensor 'a' is F33, not one of"),
        (file_of({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}), "tensor 'a' is "),
        (file_of({"a": {"dtype": "F32", "data_offsets": [0, 4]}}), "tensor 'a' needs a shape and data_offsets"),
        (file_of({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}), "tensor 'a' needs a shape"),
        (file_of({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}), "tensor 'a' needs a shape"),
        (file_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}), "tensor 'a' has data_offsets"),
        (file_of({"a": {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]}}), "tensor 'a' has data_offsets"),
        (file_of({"a": {"dtype": "F32", "shape": [1 << 47, 0, 2], "data_offsets": [0, 0]}}), "tensor 'a' has data_"),
        (file_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}), "tensor 'a' begins at 4, not 0"),
        (file_of({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"xy"), "has more than the 1 bytes"),
        (file_of({"a": 1}), "tensor 'a' is None"),
    ],
    ids=range(15),
)
def test_invalid_files(content: bytes, problem: str) -> None:
    check = Checked()
    with pytest.raises(InvalidArgument) as error:
        WeightUpload(check).write(content)
    assert error.value.field == "data"
    assert error.value.problem.startswith(problem)
    assert not check.given
