"""Physical experts: rows go to a replica of each of their experts, and experts move between devices."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jpaged.device import sharded_matmul
from jpaged.device.mesh import MODEL_AXIS, build_mesh
from jpaged.device.sharded_matmul import _exchanging_kernel, _gathering_kernel, exchange_experts, replicate_experts
from jpaged.kernels.experts import ExpertMap, ExpertsKernel, ExpertWeights, Routes, sorted_rows
from jpaged.kernels.mixture_kind import SILU, Routing
from jpaged.kernels.recurrence import StatefulPool, read_expert_load, record_routes
from jpaged.models.config import Mixture
from jpaged.models.sharding import build_expert_map
from tests.conftest import QUICK_XLA_OPTIONS
from tests.kernels.experts.mixtures import mixture, numbers, random_routes

NUM_DEVICES, NUM_EXPERTS, NUM_PHYSICAL, TOP_K, WIDTH = 4, 8, 12, 3, 16
PLACEMENTS = (
    [0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 1, 1],
    [7, 0, 6, 0, 5, 1, 0, 4, 3, 7, 2, 7],
)
"""Logical experts of the physical ones, three on each device."""
KIND = Mixture(routing=Routing(NUM_EXPERTS, TOP_K), width=8, is_parallel=True, num_redundant_experts=4)


def expert_map(placement: list[int]) -> ExpertMap:
    starts, physical = build_expert_map(np.array([placement]), NUM_EXPERTS)
    return ExpertMap(jnp.asarray(starts[0]), jnp.asarray(physical[0]))


def test_a_row_goes_to_a_replica_of_each_of_its_experts_whatever_the_other_rows() -> None:
    routes, x = random_routes(64, NUM_EXPERTS, TOP_K, 60), numbers((64, WIDTH), "float32")
    apply = jax.jit(ExpertMap.apply, compiler_options=QUICK_XLA_OPTIONS)
    for placement in PLACEMENTS:
        found = np.asarray(apply(expert_map(placement), routes, x).ids_tk)
        assert np.all(found[60:] == NUM_PHYSICAL), "rows that are not in use go nowhere"
        assert np.array_equal(np.array(placement)[found[:60]], routes.ids_tk[:60])
        other = np.roll(x, 1, axis=0)
        other[5] = x[5]
        again = np.asarray(apply(expert_map(placement), routes, other).ids_tk)
        assert np.array_equal(again[5], found[5])
        for replicas in (np.flatnonzero(np.array(placement) == expert) for expert in range(NUM_EXPERTS)):
            assert set(replicas) <= set(found[:60].reshape(-1)), "every replica has rows"


def test_replicas_do_not_depend_on_the_number_of_rows() -> None:
    routes, x = random_routes(300, NUM_EXPERTS, TOP_K, 300), numbers((300, 96), "float32")
    few = Routes(routes.ids_tk[:3], routes.weights_tk[:3])
    apply, chosen = jax.jit(ExpertMap.apply, compiler_options=QUICK_XLA_OPTIONS), expert_map(PLACEMENTS[-1])
    found, of_few = (np.asarray(apply(chosen, *one).ids_tk) for one in ((routes, x), (few, x[:3])))
    assert np.array_equal(found[:3], of_few)


@pytest.mark.parametrize("make", [pytest.param(_exchanging_kernel, marks=pytest.mark.long), _gathering_kernel])
def test_results_have_the_same_bits_wherever_experts_are(make: Callable[..., ExpertsKernel]) -> None:
    mesh, routes = build_mesh(jax.devices()[:NUM_DEVICES]), random_routes(12, NUM_EXPERTS, TOP_K, 11)
    weights = mixture(NUM_EXPERTS, WIDTH, 8, "float32", has_biases=False)
    x = jnp.asarray(numbers((12, WIDTH), "float32"))
    kernel = make(sorted_rows.apply_tiles, KIND, mesh)

    def run(x: jax.Array, routes: Routes, weights: ExpertWeights, physical: ExpertMap) -> jax.Array:
        return kernel(x, physical.apply(routes, x), weights, SILU)

    jitted = jax.jit(run, compiler_options=QUICK_XLA_OPTIONS)
    matrices = [np.asarray(each) for each in (weights.gate, weights.up, weights.down)]
    found = [
        np.asarray(jitted(x, routes, ExpertWeights(*(jnp.asarray(each[one]) for each in matrices)), expert_map(one)))
        for one in PLACEMENTS
    ]
    assert np.array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0], sorted_rows.apply_tiles(x, routes, weights, SILU), rtol=0, atol=1e-5)


@pytest.mark.parametrize("platform", ["tpu", pytest.param("gpu", marks=pytest.mark.long)])
def test_accelerators_send_rows_once_and_results_once_for_each_expert(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_matmul, "first_device", lambda mesh: types.SimpleNamespace(platform=platform))
    kernel = _exchanging_kernel(sorted_rows.apply_tiles, KIND, build_mesh(jax.devices()[:NUM_DEVICES]))
    weights = mixture(NUM_PHYSICAL, WIDTH, 8, "float32", has_biases=False)
    traced = jax.jit(kernel, static_argnums=3).trace(
        jnp.zeros((8, WIDTH)), random_routes(8, NUM_PHYSICAL, TOP_K), weights, SILU
    )
    text = traced.lower(lowering_platforms=({"gpu": "cuda"}.get(platform, platform),)).as_text()
    sent = [line for line in text.splitlines() if "ragged_all_to_all" in line]
    assert ["tensor<6x16xf32>" in sent[0], "tensor<24x16xf32>" in sent[1]] == [True, True]
    assert len(sent) == 2


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "int4"])
def test_experts_move_to_any_device(dtype: str) -> None:
    mesh, spec = build_mesh(jax.devices()[:NUM_DEVICES]), PartitionSpec(None, MODEL_AXIS)
    experts = np.arange(2 * NUM_EXPERTS * 2).reshape(2, NUM_EXPERTS, 2) % 8
    leaf = jax.device_put(jnp.asarray(experts, dtype), NamedSharding(mesh, spec))
    spread = functools.partial(replicate_experts, spec=spec, mesh=mesh, is_stacked=True)
    placements = np.array(PLACEMENTS, np.int32)
    physical = jax.jit(spread, compiler_options=QUICK_XLA_OPTIONS)(leaf, placements)
    wanted = np.stack([experts[layer][placement] for layer, placement in enumerate(placements)])
    assert np.array_equal(np.asarray(physical, np.int32), wanted)
    assert physical.dtype == leaf.dtype and physical.sharding.shard_shape(physical.shape) == (2, 3, 2)
    sources = np.array([11, 2, 0, 5, 5, 5, 7, 1, 9, 10, 3, 4], np.int32)
    exchange = functools.partial(exchange_experts, spec=spec, mesh=mesh, is_stacked=True)
    moved = np.asarray(jax.jit(exchange, compiler_options=QUICK_XLA_OPTIONS)(physical, np.int32(1), sources), np.int32)
    assert np.array_equal(moved[0], wanted[0]), "the other layer stays"
    assert np.array_equal(moved[1], wanted[1][sources])


def test_arrays_that_every_device_has_are_reordered_in_place() -> None:
    mesh, bias = build_mesh(jax.devices()[:NUM_DEVICES]), np.arange(16.0).reshape(8, 2)
    take = functools.partial(replicate_experts, spec=PartitionSpec(), mesh=mesh, is_stacked=False)
    moved = jax.jit(take, compiler_options=QUICK_XLA_OPTIONS)(bias, np.array([3, 3, 1], np.int32))
    assert np.array_equal(moved, bias[[3, 3, 1]])


def test_each_device_counts_the_rows_that_it_routed() -> None:
    pool = StatefulPool(jnp.zeros(1), (), jnp.zeros((1, 2, 2, 4), jnp.int32))
    ids = jnp.array([[0, 1], [1, 3], [2, 0], [4, 4]])  # 4 is none; two rows on each device
    for _ in range(2):
        pool = record_routes(pool, ids, 0, jnp.int32(1))
    assert pool.expert_load[0].tolist() == [[[0] * 4] * 2, [[2, 4, 0, 2], [2, 0, 2, 0]]]
    zeros, load = read_expert_load(pool.expert_load)
    assert (load[0].tolist(), bool(jnp.any(zeros))) == ([[0.0] * 4, [4.0, 4.0, 2.0, 2.0]], False)
    without = dataclasses.replace(pool, expert_load=None)
    assert record_routes(without, ids, 0, jnp.int32(0)) is without
