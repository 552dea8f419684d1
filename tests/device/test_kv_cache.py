"""Who holds the pool, and how many blocks it gets."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.device import kv_cache
from jpaged.device.kv_cache import KVPool, PoolRequest, check_num_blocks, default_num_blocks
from jpaged.device.mesh import build_mesh, replicated
from jpaged.errors import InternalError, InvalidArgument
from jpaged.kernels.kv_layout import KVLayout

GIB = 1 << 30
REQUEST = PoolRequest(
    bytes_per_block=1 << 20,
    block_size=16,
    max_num_seqs=8,
    max_model_len=1000,
    memory_utilization=0.5,
    weight_bytes=GIB,
)


class Device:
    """Reports the memory that it is told."""

    def __init__(self, platform: str, stats: dict[str, int] | None = None) -> None:
        self.platform = platform
        self._stats = stats

    def memory_stats(self) -> dict[str, int] | None:
        return self._stats


def num_blocks(device: Device, temp_bytes: int = 0, **changes: float) -> int:
    request = dataclasses.replace(REQUEST, **changes)  # type: ignore[arg-type]
    return default_num_blocks(request, device, lambda: temp_bytes)


def unexpected_compile() -> int:
    raise AssertionError("compiled, although memory was no limit")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(kv_cache, "_available_host_bytes", lambda: 5 * GIB)
    return Device("cpu")


def test_a_cpu_gets_what_its_rows_can_use(host: Device) -> None:
    assert default_num_blocks(REQUEST, host, unexpected_compile) == 8 * 63


def test_a_cpu_with_little_memory_gets_what_fits(host: Device) -> None:
    """Half of 5 GiB free and 1 of weights, less the weights: 2 GiB, less the programs' and the null block."""
    assert num_blocks(host, temp_bytes=GIB // 2, max_num_seqs=64) == 1535


def test_an_accelerator_gets_its_share_of_the_device() -> None:
    device = Device("gpu", {"bytes_limit": 10 * GIB, "bytes_in_use": 3 * GIB})
    assert num_blocks(device) == (8 * GIB // 2 - GIB) // (1 << 20) - 1


def test_too_little_memory_is_refused_with_the_numbers(host: Device) -> None:
    message = (
        r"memory_utilization: 0.3 of 6.00 GiB, less 1.00 for weights and 0.75 for programs, leaves 50 blocks of "
        r"1048576 bytes; one sequence of max_model_len \(1000\) needs 63: raise it, or lower max_model_len"
    )
    with pytest.raises(InvalidArgument, match=message):
        num_blocks(host, temp_bytes=GIB * 3 // 4, memory_utilization=0.3, max_num_seqs=64)


def test_an_accelerator_that_hides_its_memory_needs_a_number() -> None:
    with pytest.raises(InvalidArgument, match="num_blocks: gpu does not report its memory"):
        num_blocks(Device("gpu"))


def test_this_hosts_memory_is_found() -> None:
    assert 1 << 28 < kv_cache._available_host_bytes() < 1 << 50


def test_a_chosen_number_may_be_small_and_must_fit_into_memory(host: Device) -> None:
    assert check_num_blocks(1, REQUEST, host) == 1
    assert check_num_blocks(5 * 1024 - 1, REQUEST, host) == 5 * 1024 - 1
    with pytest.raises(InvalidArgument, match=r"num_blocks: 5120 of 1048576 bytes are more than memory holds, 5119"):
        check_num_blocks(5 * 1024, REQUEST, host)


def test_a_chosen_number_is_held_against_an_accelerators_memory_where_it_is_known() -> None:
    device = Device("gpu", {"bytes_limit": 10 * GIB, "bytes_in_use": 3 * GIB})
    assert check_num_blocks(7 * 1024 - 1, REQUEST, device) == 7 * 1024 - 1
    with pytest.raises(InvalidArgument, match="more than memory holds, 7167"):
        check_num_blocks(7 * 1024, REQUEST, device)
    assert check_num_blocks(1 << 20, REQUEST, Device("gpu")) == 1 << 20


def _pool() -> KVPool:
    layout = KVLayout(1, 3, 4, 1, 8, jnp.dtype("bfloat16"))
    return KVPool(layout, replicated(build_mesh(jax.devices()[:1])))


def test_a_pool_starts_as_zeros_and_is_spent_while_a_step_has_it() -> None:
    pool = _pool()
    array = pool.take()
    np.testing.assert_array_equal(array, 0)
    assert (array.shape, str(array.dtype)) == ((4, 4, 2, 8), "uint16")
    assert pool.is_spent
    with pytest.raises(InternalError, match="the KV pool is spent"):
        pool.take()
    pool.put(array)
    assert pool.take() is array


def test_a_pool_is_given_back_once() -> None:
    pool = _pool()
    array = pool.take()
    pool.put(array)
    with pytest.raises(InternalError, match="given back twice"):
        pool.put(array)


def test_a_released_pool_frees_its_memory() -> None:
    pool = _pool()
    array = pool.take()
    pool.put(array)
    pool.release()
    pool.release()
    assert array.is_deleted()
    with pytest.raises(InternalError, match="spent"):
        pool.take()
