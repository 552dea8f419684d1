"""Sequences distributed over devices: each device's rows and blocks, and the exchange of rows with experts."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jpaged.device import sharded_matmul
from jpaged.device.context import RankOrder
from jpaged.device.mesh import build_mesh
from jpaged.device.sharded_matmul import RowExchange, _exchanging_kernel
from jpaged.kernels.experts import ExpertWeights, Routes, sorted_rows
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.mixture_kind import SILU, Routing
from jpaged.kernels.paged_attention.spec import RaggedRows
from jpaged.models.config import Mixture
from tests.conftest import QUICK_XLA_OPTIONS
from tests.kernels.experts.mixtures import mixture, numbers, random_routes

LAYOUT = KVLayout(2, 6, 4, 1, 8, jnp.dtype("float32"), value_dim=4, dp_size=2)
"""Blocks 1 to 3 are on device 0, 4 to 6 on device 1."""
TABLES = [[4, 6, 0], [1, 0, 0], [5, 0, 0], [0, 0, 0]]
NUMS, STARTS = [3, 1, 2], [0, 3, 4, 6, 6]
NUM_TOKENS = 16


def step_inputs() -> dict[str, jax.Array]:
    slots = [16, 17, 24, 5, 20, 21]
    return {
        "query_starts_s1": jnp.array(STARTS, jnp.int32),
        "num_rows": jnp.int32(3),
        "block_tables_gsm": jnp.array([TABLES], jnp.int32),
        "positions_t": jnp.arange(NUM_TOKENS, dtype=jnp.int32) + 100,
        "slots_gt": jnp.array([slots + [0] * (NUM_TOKENS - len(slots))], jnp.int32),
    }


def test_the_tokens_of_a_device_are_adjacent() -> None:
    order = RankOrder.of(step_inputs(), LAYOUT)
    assert order.is_used_t.nonzero()[0].tolist() == [0, 8, 9, 10, 11, 12]
    assert order.tokens_t[order.is_used_t].tolist() == [3, 0, 1, 2, 4, 5]
    assert order.places_t[:6].tolist() == [8, 9, 10, 0, 11, 12]
    ordered = order.ordered(step_inputs())
    assert ordered["positions_t"][order.is_used_t].tolist() == [103, 100, 101, 102, 104, 105]
    assert ordered["slots_gt"][0].tolist() == [5, *[0] * 7, 16, 17, 24, 20, 21, 0, 0, 0]


def test_a_device_has_its_own_rows_with_the_numbers_of_its_own_blocks() -> None:
    inputs = step_inputs()
    order = RankOrder.of(inputs, LAYOUT)
    rows = RaggedRows(
        inputs["query_starts_s1"], jnp.array([9, 4, 2, 0]), inputs["block_tables_gsm"][0], inputs["num_rows"], None
    )
    slots_t = order.ordered(inputs)["slots_gt"][0]
    first, second = (order.get_rows(rows, jnp.int32(rank), LAYOUT) for rank in range(2))
    assert (int(first.num_rows), first.query_starts_s1.tolist()) == (1, [0, 1, 1])
    assert (first.kv_lens_s.tolist(), first.block_tables_sm[0].tolist()) == ([4, 0], [1, 0, 0])
    assert (int(second.num_rows), second.query_starts_s1.tolist()) == (2, [0, 3, 5])
    assert second.kv_lens_s.tolist() == [9, 2]
    assert second.block_tables_sm[:2].tolist() == [[1, 3, 0], [2, 0, 0]]
    own = [RankOrder.own_slots(slots_t, jnp.int32(rank), LAYOUT).tolist() for rank in range(2)]
    assert own == [[5, *[0] * 7], [4, 5, 12, 8, 9, 0, 0, 0]]


def test_a_pool_in_parts_has_a_null_block_in_each() -> None:
    assert (LAYOUT.shape, LAYOUT.local.shape) == ((16, 4, 1, 8), (8, 4, 1, 8))
    assert LAYOUT.num_bytes == 2 * LAYOUT.local.num_bytes
    assert LAYOUT.bytes_per_block == LAYOUT.local.bytes_per_block, "a block is on one device"
    ids = jnp.arange(7)
    assert [LAYOUT.local_ids(ids, rank).tolist() for rank in range(2)] == [[0, 1, 2, 3, 0, 0, 0], [0, 0, 0, 0, 1, 2, 3]]
    with pytest.raises(ValueError, match="num_blocks: 5 is not a multiple of dp_size, 2"):
        dataclasses.replace(LAYOUT, num_blocks=5)


NUM_EXPERTS, TOP_K, WIDTH = 8, 3, 16


def exchanging(mesh: Mesh) -> Callable[[jax.Array, Routes, ExpertWeights], jax.Array]:
    kind = Mixture(routing=Routing(NUM_EXPERTS, TOP_K), width=8, is_parallel=True)
    kernel = _exchanging_kernel(sorted_rows.apply_tiles, kind, mesh)
    return lambda x_te, routes, weights: kernel(x_te, routes, weights, SILU)


def all_to_one(num_rows: int) -> Routes:
    """Every row chooses experts of the last device only."""
    ids = jnp.broadcast_to(jnp.array([NUM_EXPERTS - 1, NUM_EXPERTS - 2, NUM_EXPERTS], jnp.int32), (num_rows, TOP_K))
    return Routes(ids, jnp.full((num_rows, TOP_K), 0.5, jnp.float32))


def with_gaps(num_rows: int) -> Routes:
    """Every third row is not in use."""
    routes = random_routes(num_rows, NUM_EXPERTS, TOP_K)
    is_unused_t = (jnp.arange(num_rows) % 3 == 1)[:, None]
    return Routes(jnp.where(is_unused_t, NUM_EXPERTS, routes.ids_tk), routes.weights_tk)


@pytest.mark.parametrize("make", [all_to_one, with_gaps])
@pytest.mark.long
def test_no_row_is_dropped_whatever_experts_the_rows_choose(make: Callable[[int], Routes]) -> None:
    num_devices, num_rows = 4, 12
    mesh = build_mesh(jax.devices()[:num_devices])
    routes = make(num_rows)
    weights = mixture(NUM_EXPERTS, WIDTH, 8, "float32", has_biases=False)
    x = jnp.asarray(numbers((num_rows, WIDTH), "float32"))
    run = exchanging(mesh)
    got = jax.jit(run, compiler_options=QUICK_XLA_OPTIONS)(x, routes, weights)
    np.testing.assert_allclose(got, sorted_rows.apply_tiles(x, routes, weights, SILU), rtol=0, atol=1e-5)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_accelerators_exchange_messages_of_any_length(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_matmul, "first_device", lambda mesh: types.SimpleNamespace(platform=platform))
    mesh = build_mesh(jax.devices()[:4])
    run = exchanging(mesh)
    weights = mixture(NUM_EXPERTS, WIDTH, 8, "float32", has_biases=False)
    traced = jax.jit(run).trace(jnp.zeros((8, WIDTH)), random_routes(8, NUM_EXPERTS, TOP_K), weights)
    text = traced.lower(lowering_platforms=({"gpu": "cuda"}.get(platform, platform),)).as_text()
    assert text.count("ragged_all_to_all") == 2, "rows to the experts, and back"
    assert "stablehlo.all_to_all" not in text


def test_rows_are_sent_once_to_each_device_of_their_experts() -> None:
    ids = jnp.array([[[0, 1], [0, 2]], [[3, 2], [4, 4]]])  # 4 is none; device 0 has experts 0 and 1, device 1 2 and 3
    exchange = RowExchange.of(ids, jnp.int32(0), 2)
    assert exchange.counts_nn.tolist() == [[2, 1], [0, 1]]
    assert exchange.sent_m[:3].tolist() == [0, 1, 1]
    assert exchange.places_ck.tolist() == [[0, 4], [1, 2]]
    assert (exchange.found_t[:2].tolist(), exchange.is_found_t.tolist()) == ([0, 1], [True, True, False, False])
    other = RowExchange.of(ids, jnp.int32(1), 2)
    assert (other.found_t[:2].tolist(), other.is_found_t.tolist()) == ([1, 2], [True, True, False, False])
    assert other.places_ck.tolist() == [[0, 4], [4, 4]]


def exchanged(sent: list[np.ndarray], sizes: list[list[np.ndarray]], num_places: int) -> list[np.ndarray]:
    """What `jax.lax.ragged_all_to_all` is documented to do; -1 where nothing arrives."""
    found = [np.full(num_places, -1) for _ in sent]
    for source, (first_n, num_n, place_n, _) in enumerate(sizes):
        for target, (first, num, place) in enumerate(zip(first_n, num_n, place_n, strict=True)):
            assert num == sizes[target][3][source], "every device expects what it is sent"
            found[target][place : place + num] = sent[source][first : first + num]
    return found


@pytest.mark.long
def test_messages_of_any_length_bring_each_row_there_and_back() -> None:
    ids = np.asarray(random_routes(12, NUM_EXPERTS, TOP_K).ids_tk).reshape(4, 3, TOP_K)
    devices = [RowExchange.of(jnp.asarray(ids), jnp.int32(rank), 2) for rank in range(4)]
    sent = [3 * rank + np.asarray(device.sent_m) for rank, device in enumerate(devices)]
    sizes = [[np.asarray(one) for one in device.dispatch_sizes] for device in devices]
    found = exchanged(sent, sizes, 12)
    for rank, (device, rows) in enumerate(zip(devices, found, strict=True)):
        uses = (ids.reshape(12, TOP_K) // 2 == rank).any(axis=1).nonzero()[0].tolist()
        assert rows[rows >= 0].tolist() == device.found_t[device.is_found_t].tolist() == uses
    back = exchanged(found, [[np.asarray(one) for one in device.combine_sizes] for device in devices], 9)
    for rank, (device, rows) in enumerate(zip(devices, back, strict=True)):
        for row, places in enumerate(np.asarray(device.places_ck)):
            num_devices = len({*(ids[rank, row] // 2)})
            assert [rows[place] for place in places if place < 9] == [3 * rank + row] * num_devices
