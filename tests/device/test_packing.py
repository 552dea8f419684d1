"""Arrays through one buffer and back."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jpaged.device.packing import Field, Packing
from jpaged.errors import InternalError

PACKING = Packing(
    (
        Field("ids", (2, 3), "int32"),
        Field("flags", (3,), "bool"),
        Field("seeds", (2, 2), "uint32"),
        Field("count", (), "int32"),
        Field("shares", (2,), "float32"),
    )
)


def _arrays() -> dict[str, np.ndarray]:
    return {
        "ids": np.array([[1, -2, 2**31 - 1], [0, 5, -(2**31)]], np.int32),
        "flags": np.array([True, False, True]),
        "seeds": np.array([[2**32 - 1, 0], [7, 2**31]], np.uint32),
        "count": np.array(9, np.int32),
        "shares": np.array([-0.0, np.nan], np.float32),
    }


def test_arrays_come_out_as_they_went_in() -> None:
    got = jax.jit(PACKING.unpack)(PACKING.pack(_arrays()))
    for name, want in _arrays().items():
        assert got[name].dtype == want.dtype
        assert np.asarray(got[name]).tobytes() == want.tobytes()


def test_each_call_packs_into_a_buffer_of_its_own() -> None:
    assert not np.shares_memory(PACKING.pack(_arrays()), PACKING.pack(_arrays()))


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("ids", np.zeros((3, 2), np.int32), r"ids is int32\(3, 2\); the program takes int32\(2, 3\)"),
        ("shares", np.zeros(2), r"shares is float64\(2,\); the program takes float32\(2,\)"),
        ("flags", None, "flags is missing"),
    ],
)
def test_other_shapes_are_refused_by_name(name: str, array: np.ndarray | None, message: str) -> None:
    arrays = {k: v for k, v in {**_arrays(), name: array}.items() if v is not None}
    with pytest.raises(InternalError, match=message):
        PACKING.pack(arrays)
