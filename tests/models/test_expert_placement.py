"""Physical experts on devices: replicas of the heaviest, packed by load, with few moves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.models.sharding import balance_experts, build_expert_map, device_loads, get_sources

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 5), st.integers(0, 3))
"""Layers, devices, logical experts of each device, and redundant ones of each."""


def random_load(seed: int, num_layers: int, num_experts: int) -> np.ndarray:
    """Loads as skewed as those of real routers, some of them 0."""
    rng = np.random.default_rng(seed)
    load = np.floor(rng.pareto(1.0, (num_layers, num_experts)) * 20)
    load[rng.random(load.shape) < 0.2] = 0
    return load


def own_experts(num_layers: int, num_devices: int, num_own: int, num_redundant: int) -> np.ndarray:
    """The experts without balancing: each device has its own, the redundant ones repeat them."""
    of_device = [
        [device * num_own + place % num_own for place in range(num_own + num_redundant)]
        for device in range(num_devices)
    ]
    return np.tile(np.array(of_device, np.int32).reshape(-1), (num_layers, 1))


@settings(max_examples=60)
@given(SIZES, st.integers(0, 1 << 30))
def test_every_expert_has_a_replica_and_no_device_more_load_than_before(
    sizes: tuple[int, int, int, int], seed: int
) -> None:
    num_layers, num_devices, num_own, num_redundant = sizes
    num_experts, num_physical = num_devices * num_own, num_devices * (num_own + num_redundant)
    load = random_load(seed, num_layers, num_experts)
    current = own_experts(*sizes)
    found = balance_experts(load, num_physical, num_devices, current)
    assert found.shape == (num_layers, num_physical), "each device has equally many places"
    for layer in found:
        assert set(layer.tolist()) == set(range(num_experts)), "every logical expert has a replica"
    unreplicated = load.reshape(num_layers, num_devices, num_own).sum(axis=2).max(axis=1)
    loads = device_loads(load, found, num_devices)
    assert np.all(loads.max(axis=1) <= unreplicated * (1 + 1e-9))
    np.testing.assert_allclose(loads.sum(axis=1), load.sum(axis=1))
    again = balance_experts(load, num_physical, num_devices, found)
    assert np.array_equal(again, found), "experts that are balanced stay"


@settings(max_examples=60)
@given(SIZES, st.integers(0, 1 << 30))
def test_moves_bring_every_expert_to_its_place(sizes: tuple[int, int, int, int], seed: int) -> None:
    num_layers, num_devices, num_own, num_redundant = sizes
    num_experts, num_physical = num_devices * num_own, num_devices * (num_own + num_redundant)
    old = balance_experts(random_load(seed, num_layers, num_experts), num_physical, num_devices)
    new = balance_experts(random_load(seed + 1, num_layers, num_experts), num_physical, num_devices, old)
    for old_p, new_p in zip(old, new, strict=True):
        sources = get_sources(old_p, new_p, num_devices)
        assert np.array_equal(old_p[sources], new_p)
        stays = old_p == new_p
        assert np.array_equal(sources[stays], np.flatnonzero(stays)), "an expert that stays is not moved"
    starts, physical = build_expert_map(new, num_experts)
    for layer in range(num_layers):
        for expert in range(num_experts):
            replicas = physical[layer, starts[layer, expert] : starts[layer, expert + 1]]
            assert replicas.tolist() == np.flatnonzero(new[layer] == expert).tolist()


def test_the_heaviest_expert_gets_the_replicas() -> None:
    found = balance_experts(np.array([[90.0, 10.0, 20.0, 10.0]]), 6, 2)
    assert np.bincount(found[0]).tolist() == [3, 1, 1, 1]
    assert device_loads(np.array([[90.0, 10.0, 20.0, 10.0]]), found, 2).max() == 70
    assert device_loads(np.array([[90.0, 10.0, 20.0, 10.0]]), np.array([[0, 1, 2, 3]]), 2).max() == 100


def test_devices_keep_the_experts_that_they_have() -> None:
    """One of two heavy experts changes places with a light one; all others stay."""
    current = np.array([[6, 0, 1, 2, 3, 4, 5, 7]], np.int32)
    load = np.array([[9.0, 1.0, 1.0, 2.0, 2.0, 3.0, 9.0, 2.0]])
    assert device_loads(load, current, 4).tolist() == [[18, 2, 4, 5]]
    found = balance_experts(load, 8, 4, current)
    assert device_loads(load, found, 4).max() == 10
    assert found.tolist() == [[1, 0, 6, 2, 3, 4, 5, 7]]


@pytest.mark.parametrize(("num_physical", "num_devices"), [(3, 1), (5, 2)])
def test_physical_experts_have_to_fit(num_physical: int, num_devices: int) -> None:
    with pytest.raises(ValueError, match=f"num_physical: {num_physical} is below 4 experts, or no multiple"):
        balance_experts(np.ones((1, 4)), num_physical, num_devices)
