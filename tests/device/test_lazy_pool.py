"""The pool of a CPU: zeros whose pages are mapped when they are first used."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jpaged.device import model_runner
from jpaged.device.mesh import serving_mesh
from jpaged.device.model_runner import DonatedArray

MIB = 1 << 20


def resident_bytes() -> int:
    """Memory of this process that is mapped."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def make(num_bytes: int) -> DonatedArray:
    return DonatedArray((num_bytes,), np.dtype(np.int8), NamedSharding(serving_mesh(1), PartitionSpec()))


def test_a_pool_takes_memory_when_it_is_used_and_is_zero() -> None:
    write = jax.jit(lambda pool, at: pool.at[at].set(7), donate_argnums=0)
    make(3 * MIB).take().block_until_ready()  # everything is loaded
    before = resident_bytes()
    pool = make(512 * MIB)
    pool.wait()
    assert resident_bytes() - before < 64 * MIB
    pool.put(write(pool.take(), 300 * MIB))
    pool.wait()
    assert resident_bytes() - before < 64 * MIB
    array = pool.take()
    assert [int(array[at]) for at in (0, 300 * MIB - 1, 300 * MIB, 512 * MIB - 1)] == [0, 0, 7, 0]


@pytest.mark.parametrize("num_bytes", [1, 100, 4096, 4097, 70_001, 40 * MIB + 3])
def test_memory_that_was_used_before_is_zero_again(num_bytes: int) -> None:
    for _ in range(3):
        dirty = jnp.full((num_bytes,), 9, jnp.int8).block_until_ready()
        del dirty
        assert not np.asarray(make(num_bytes).take()).any()


def test_without_the_library_a_pool_is_zero_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "blank_pool", lambda shape, dtype: None)
    assert not np.asarray(make(MIB).take()).any()
