"""Physical experts on devices: replicas of the heaviest, packed by load, with few moves."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.device.expert_balance import ExpertPlacer, expert_ratios
from jpaged.models.sharding import (
    balance_experts,
    build_expert_map,
    device_loads,
    get_sources,
    with_parallel_experts,
    with_redundant_experts,
)
from jpaged.plan.known_models import KNOWN_MODELS

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


@settings(max_examples=40)
@given(SIZES, st.integers(1, 4), st.integers(1, 3), st.integers(0, 1 << 30))
def test_groups_of_experts_stay_on_a_node(
    sizes: tuple[int, int, int, int], num_nodes: int, of_node: int, seed: int
) -> None:
    """Each node has whole groups, equally many; replicas are on the expert's own node."""
    num_layers, of_group, groups_of_node, num_redundant = sizes
    num_groups, num_devices = num_nodes * groups_of_node, num_nodes * of_node
    num_experts = num_groups * of_group
    num_physical = -(-num_experts // num_devices + -num_redundant) * num_devices
    if num_physical < num_experts:
        num_physical += num_devices
    groups = {"num_groups": num_groups, "num_nodes": num_nodes}
    load = random_load(seed, num_layers, num_experts)
    first = balance_experts(np.ones_like(load), num_physical, num_devices, None, **groups)
    found = balance_experts(load, num_physical, num_devices, first, **groups)
    for layer in (*first, *found):
        assert set(layer.tolist()) == set(range(num_experts))
        of_nodes = [set((experts // of_group).tolist()) for experts in layer.reshape(num_nodes, -1)]
        assert [len(one) for one in of_nodes] == [groups_of_node] * num_nodes
        assert len(set().union(*of_nodes)) == num_groups, "a group is on one node only"
    before, after = (device_loads(load, one, num_devices).max(axis=1) for one in (first, found))
    assert np.all(after <= before)


def test_groups_are_packed_as_by_deepseek() -> None:
    """The example of https://github.com/deepseek-ai/EPLB: 2 layers, 12 experts in 4 groups, 16 places, 2 nodes of 4.

    Devices may be in another order, and replicas of equal load may change places.
    """
    load = np.array(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ]
    )
    published = np.array(
        [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1], [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]]
    )
    found = balance_experts(load, 16, 8, num_groups=4, num_nodes=2)
    for layer, wanted in zip(found, published, strict=True):
        assert {frozenset(node) for node in layer.reshape(2, 8).tolist()} == {
            frozenset(node) for node in wanted.reshape(2, 8).tolist()
        }
        assert np.bincount(layer).tolist() == np.bincount(wanted).tolist()
    loads, wanted_loads = (np.sort(device_loads(load, one, 8), axis=1) for one in (found, published))
    np.testing.assert_allclose(loads, wanted_loads)


def test_experts_stay_on_their_nodes() -> None:
    """Groups are packed onto the same nodes, in whichever order, so that experts move only within a node."""
    load = np.array([[5.0, 5, 1, 1, 1, 1, 6, 1]])
    groups = {"num_groups": 4, "num_nodes": 2}
    for current in ([0, 1, 4, 5, 6, 7, 2, 3], [6, 7, 2, 3, 0, 1, 4, 5]):
        found = balance_experts(load, 8, 4, np.array([current], np.int32), **groups)
        assert device_loads(load, found, 4).max() == 7
        assert [set(node) for node in found.reshape(2, 4).tolist()] == [set(current[:4]), set(current[4:])]


def test_nodes_that_do_not_divide_the_groups_share_all_experts() -> None:
    load = random_load(3, 2, 12)
    of_one = balance_experts(load, 18, 6)
    np.testing.assert_array_equal(balance_experts(load, 18, 6, num_groups=4, num_nodes=3), of_one)
    assert not np.array_equal(balance_experts(load, 18, 6, num_groups=3, num_nodes=3), of_one)


def test_the_load_of_an_expert_is_relative_to_its_layer() -> None:
    found = expert_ratios(np.array([[6.0, 1, 1, 0], [0, 0, 0, 0], [2, 2, 2, 2]]))
    assert found.tolist() == [[3, 0.5, 0.5, 0], [1, 1, 1, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("slices", "processes", "num_nodes"),
    [
        ((0, 0, 1, 1), (0, 1, 2, 3), 2),  # two machines with two processes each
        (None, (0, 0, 1, 1), 2),
        (None, (0, 1, 0, 1), 1),
        (None, (0, 0, 0, 1), 1),
        ((0, 0, 0, 0), (0, 0, 1, 1), 1),  # one slice of TPUs
    ],
)
def test_nodes_are_slices_or_else_processes(
    slices: tuple[int, ...] | None, processes: tuple[int, ...], num_nodes: int
) -> None:
    devices: list[Any] = [types.SimpleNamespace(process_index=process) for process in processes]
    for device, index in zip(devices, slices or (), strict=False):
        device.slice_index = index
    mesh: Any = types.SimpleNamespace(devices=np.array(devices), shape={"model": 4})
    config = with_redundant_experts(with_parallel_experts(KNOWN_MODELS["deepseek-v3"].config), 4, 4)
    placer = ExpertPlacer.of(config, mesh)
    assert (placer.num_physical, placer.num_devices, placer.num_groups) == (260, 4, 8)
    assert placer.num_nodes == num_nodes
    of_nodes = placer.place(np.ones((1, 256)))[0].reshape(num_nodes, -1) // 32
    assert [len(set(node)) for node in of_nodes.tolist()] == [8 // num_nodes] * num_nodes


@pytest.mark.parametrize(
    ("groups", "message"),
    [({"num_groups": 3}, "num_groups: 3 does not divide 4"), ({"num_nodes": 3}, "num_nodes: 3 does not divide 2")],
)
def test_groups_and_nodes_have_to_divide(groups: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance_experts(np.ones((1, 4)), 4, 2, None, **groups)
