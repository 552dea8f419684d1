"""Arrays through one buffer and back."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import numpy as np
import pytest

from jpaged.device.model_runner import Packing
from jpaged.errors import InternalError

PACKING = Packing.of(
    ids=((2, 3), "int32"),
    flags=((3,), "bool"),
    seeds=((2, 2), "uint32"),
    count=((), "int32"),
    shares=((2,), "float32"),
)


@dataclass(frozen=True)
class Values:
    ids: np.ndarray = field(default_factory=lambda: np.array([[1, -2, 2**31 - 1], [0, 5, -(2**31)]], np.int32))
    flags: np.ndarray = field(default_factory=lambda: np.array([True, False, True]))
    seeds: np.ndarray = field(default_factory=lambda: np.array([[2**32 - 1, 0], [7, 2**31]], np.uint32))
    count: int = 9
    shares: np.ndarray = field(default_factory=lambda: np.array([-0.0, np.nan], np.float32))


def test_arrays_come_out_as_they_went_in() -> None:
    values = Values()
    got = jax.jit(PACKING.unpack)(PACKING.pack(values))
    assert int(got["count"]) == 9
    for name in ("ids", "flags", "seeds", "shares"):
        want = getattr(values, name)
        assert got[name].dtype == want.dtype
        assert np.asarray(got[name]).tobytes() == want.tobytes()


def test_each_call_packs_into_a_buffer_of_its_own() -> None:
    assert not np.shares_memory(PACKING.pack(Values()), PACKING.pack(Values()))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (Values(ids=np.zeros((3, 2), np.int32)), r"ids is int32\(3, 2\); the program expects int32\(2, 3\)"),
        (Values(shares=np.zeros(2)), r"shares is float64\(2,\); the program expects float32\(2,\)"),
    ],
)
def test_other_shapes_are_refused_by_name(values: Values, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        PACKING.pack(values)
