"""Safetensors files that are read with `pread`: as the library reads them, and without harm while others write them."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpaged.checkpoints import tensor_files
from jpaged.checkpoints.adapters import read_lora_config
from jpaged.checkpoints.hub import read_json
from jpaged.checkpoints.tensor_files import INDEX_FILE, SINGLE_FILE, TensorFiles, read_bounded
from jpaged.errors import InvalidArgument

TENSORS = {
    "f32": np.arange(60, dtype=np.float32).reshape(5, 4, 3),
    "bf16": np.arange(24, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(6, 4),
    "i8": np.arange(7, dtype=np.int8),
    "none": np.zeros((0, 3), np.float16),
    "scalar": np.array(3.5, np.float64),
}
PARTS = [
    (slice(1, 3),),
    (slice(None), slice(1, 3)),
    (slice(2, None), slice(None, 2), slice(1, 2)),
    (slice(None, None, 2), slice(3, 0, -1)),
    (slice(4, 1, -1),),
    (slice(3, 3),),
    (slice(None), slice(None, None, -1)),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / SINGLE_FILE, metadata={"format": "np"})
    return tmp_path / SINGLE_FILE


def opened(path: Path, then: Callable[[TensorFiles], object]) -> object:
    with ExitStack() as stack:
        return then(TensorFiles(path.parent, stack))


def test_tensors_and_parts_of_them_are_as_the_library_reads_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "_CHUNK_BYTES", 100)  # two rows at a time

    def compare(files: TensorFiles) -> None:
        assert files.names == TENSORS.keys()
        for name, expected in load_file(path).items():
            found = files.read(name, expected.shape)
            assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
        for part in PARTS:
            np.testing.assert_array_equal(files.read("f32", (5, 4, 3), part), TENSORS["f32"][part])

    opened(path, compare)


@pytest.mark.parametrize("num_kept", [0, 8, 200])
def test_a_file_that_others_make_shorter_fails_that_read_alone(path: Path, num_kept: int) -> None:
    """A mapped page of it would have ended the process with SIGBUS."""

    def cut(files: TensorFiles) -> None:
        os.truncate(path, num_kept)
        with pytest.raises(InvalidArgument, match=r"model\.safetensors: changed while it was read: write a new file"):
            files.read("f32", (5, 4, 3))
        with pytest.raises(InvalidArgument, match="changed while it was read"):
            files.read("f32", (5, 4, 3), (slice(1, 2),))

    opened(path, cut)
    with pytest.raises(InvalidArgument, match="is not a complete safetensors file"):
        opened(path, lambda files: files)


def test_a_file_that_is_overwritten_in_place_fails(path: Path) -> None:
    contents = path.read_bytes()

    def overwrite(files: TensorFiles) -> None:
        path.write_bytes(contents)
        os.utime(path, ns=(1, 1))
        with pytest.raises(InvalidArgument, match="changed while it was read"):
            files.read("i8", (7,))

    opened(path, overwrite)


def test_a_file_that_is_replaced_is_read_as_it_was(path: Path) -> None:
    def replace(files: TensorFiles) -> None:
        new = path.with_name("new")
        new.write_bytes(b"other")
        new.replace(path)
        assert files.read("i8", (7,)).tolist() == list(range(7))

    opened(path, replace)


def entry(begin: int, end: int, shape: object = (2,), dtype: str = "I8") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "{",
        '{"a": 1}',
        '{"a": {"dtype": "I8", "shape": [2], "data_offsets": [0, 2]}, "a": {}}',
        json.dumps({"a": entry(0, 3)}),
        json.dumps({"a": entry(1, 3)}),
        json.dumps({"a": entry(0, 2), "b": entry(1, 3)}),
        json.dumps({"a": entry(0, 2, [-2])}),
        json.dumps({"a": entry(0, 2, [True, 2])}),
        json.dumps({"a": entry(0, 2, "2")}),
        json.dumps({"a": entry(2, 0)}),
        json.dumps({"a": entry(0, 2), "b": entry(2, 2**63, [2**63 - 2])}),
        "[" * 100_000,
    ],
)
def test_a_header_that_does_not_describe_the_file_is_refused(tmp_path: Path, header: str) -> None:
    path, packed = tmp_path / SINGLE_FILE, header.encode()
    path.write_bytes(len(packed).to_bytes(8, "little") + packed + b"xy")
    with pytest.raises(InvalidArgument, match="is not a complete safetensors file"):
        opened(path, lambda files: files)


def test_a_header_over_the_formats_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / SINGLE_FILE
    path.write_bytes((1 << 40).to_bytes(8, "little"))
    os.truncate(path, (1 << 40) + 100)
    with pytest.raises(InvalidArgument, match="header of 1099511627776 bytes is over the limit of 100000000"):
        opened(path, lambda files: files)


def sparse(path: Path, num_bytes: int) -> Path:
    """Makes a file of NULs that takes no room on the disk."""
    path.touch()
    os.truncate(path, num_bytes)
    return path


@pytest.mark.parametrize("num_bytes", [1 << 30, 3 << 30])
def test_a_config_over_its_limit_is_refused_before_it_is_read(tmp_path: Path, num_bytes: int) -> None:
    tracemalloc.start()
    try:
        for name, limit, read in (
            ("config.json", 1 << 24, lambda: read_json(tmp_path / "config.json")),
            ("adapter_config.json", 1 << 20, lambda: read_lora_config(tmp_path)),
            (INDEX_FILE, 1 << 26, lambda: opened(tmp_path / INDEX_FILE, lambda files: files)),
        ):
            sparse(tmp_path / name, num_bytes)
            message = rf"{re.escape(name)}: has {num_bytes} bytes; the limit for this file is {limit} bytes"
            with pytest.raises(InvalidArgument, match=message):
                read()
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


def test_a_file_within_its_limit_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(InvalidArgument, match="has 5 bytes; the limit for this file is 4 bytes"):
        read_bounded(path, 4)


def test_the_header_of_an_adapter_has_a_limit_of_its_own(path: Path) -> None:
    with ExitStack() as stack, pytest.raises(InvalidArgument, match=r"header of \d+ bytes is over the limit of 100"):
        TensorFiles(path.parent, stack, max_header_bytes=100)
