"""Block moves against numpy: what lands where, in which order, and that neither pool is copied on the way."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal, get_args

import jax
import numpy as np
import pytest

from benchmarks.made_arrays import made_arrays
from jpaged.config import EngineConfig
from jpaged.device import transfers
from jpaged.device.compilation import executable_cache
from jpaged.device.compilation.compile import ProgramSpec, told
from jpaged.device.compilation.lowering import abstract_serving
from jpaged.device.executor import JaxExecutor
from jpaged.device.mesh import build_mesh, replicated, serving_mesh
from jpaged.device.step_costs import NO_RATE, measure_rates
from jpaged.device.transfers import (
    MAX_ON_THE_WAY,
    BlockPlace,
    HostPool,
    WholeHostBlocks,
    content_bytes,
    lower_move,
    move_sizes,
    num_host_blocks,
)
from jpaged.engine.executor import BlockMoves, Move
from jpaged.errors import InternalError, InvalidArgument
from jpaged.kernels.kv_layout import KVLayout
from jpaged.models.layers import Params
from tests.device import tiny_model
from tests.device.compilation.hlo import pool_sized_operations
from tests.device.driver import Driver, Row
from tests.on_demand import programs_on_demand

MoveKind = Literal["copy", "swap_out", "swap_in"]
NUM_LAYERS, NUM_BLOCKS, NUM_HOST_BLOCKS = 3, 150, 100


@functools.cache
def _executor(dtype: str) -> JaxExecutor:
    options = dataclasses.replace(
        tiny_model.OPTIONS,
        scheduler=dataclasses.replace(tiny_model.OPTIONS.scheduler, max_num_batched_tokens=8),
        cache=dataclasses.replace(
            tiny_model.OPTIONS.cache,
            num_blocks=NUM_BLOCKS,
            swap_space=(NUM_HOST_BLOCKS + 0.5) * (6144 if dtype == "float32" else 3072) / 2**30,
        ),
    )
    with programs_on_demand():
        executor = JaxExecutor.create(tiny_model.model(dtype), tiny_model.params("loop", dtype), options)
        with pytest.raises(InternalError, match="rates are not measured: warm_up has not run"):
            _ = executor.rates
        before = fill(executor, 1)
        executor.warm_up(tiny_model.quiet)
    np.testing.assert_array_equal(contents(executor)[1:], before[1:])
    return executor


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def executor(request: pytest.FixtureRequest) -> Iterator[JaxExecutor]:
    """Warming up has changed no block."""
    yield _executor(request.param)
    _executor(request.param).shutdown()
    _executor.cache_clear()


def contents(executor: JaxExecutor) -> np.ndarray:
    """The pool as [N + 1, L, B, 2K, D], as it is stored."""
    pool = executor._pool.take()
    array = np.array(pool)
    executor._pool.put(pool)
    return array.reshape(NUM_LAYERS, -1, *array.shape[1:]).swapaxes(0, 1)


def fill(executor: JaxExecutor, seed: int) -> np.ndarray:
    """Random bits everywhere, the null block too; returns what `contents` now gives."""
    pool = executor._pool.take()
    bits = np.random.default_rng(seed).integers(0, 255, (*pool.shape, pool.dtype.itemsize), np.uint8)
    executor._pool.put(jax.device_put(bits.view(pool.dtype)[..., 0], pool.sharding))
    return contents(executor)


def ids(seed: int, count: int, limit: int = NUM_BLOCKS) -> list[int]:
    return (np.random.default_rng(seed).permutation(limit)[:count] + 1).tolist()


@pytest.mark.parametrize("count", [1, 8, 9, 64, 75])
@pytest.mark.thinned(12)
def test_copies_land_in_every_layer_and_nowhere_else(executor: JaxExecutor, count: int) -> None:
    want = fill(executor, count)
    both = ids(count, 2 * count)
    sources, destinations = both[:count], both[count:]
    executor.move_blocks(BlockMoves(Move.COPY, sources, destinations))
    want[destinations] = want[sources]
    np.testing.assert_array_equal(contents(executor), want)


@pytest.mark.long
def test_one_source_may_go_to_many_places(executor: JaxExecutor) -> None:
    want = fill(executor, 0)
    executor.move_blocks(BlockMoves(Move.COPY, [7] * 10, list(range(20, 30))))
    want[20:30] = want[7]
    np.testing.assert_array_equal(contents(executor), want)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("count", [1, 9, 70, 100])
def test_what_is_swapped_out_comes_back_to_other_blocks(executor: JaxExecutor, count: int) -> None:
    before = fill(executor, count)
    away, home, host = ids(1, count), ids(2, count), ids(3, count, NUM_HOST_BLOCKS)
    executor.move_blocks(BlockMoves(Move.SWAP_OUT, away, host))
    np.testing.assert_array_equal(contents(executor), before)
    want = fill(executor, count + 1)
    order = np.random.default_rng(4).permutation(count)
    executor.move_blocks(BlockMoves(Move.SWAP_IN, [host[i] for i in order], [home[i] for i in order]))
    want[home] = before[away]
    np.testing.assert_array_equal(contents(executor), want)


def test_moves_of_a_step_keep_their_order(executor: JaxExecutor) -> None:
    """A host block is read, then written again; a device block is swapped out, then copied over, then read back."""
    want = fill(executor, 5)
    executor.move_blocks(BlockMoves(Move.SWAP_OUT, [1], [50]))
    executor.move_blocks(BlockMoves(Move.SWAP_IN, [50], [2]))
    executor.move_blocks(BlockMoves(Move.SWAP_OUT, [3], [50]))
    executor.move_blocks(BlockMoves(Move.COPY, [4], [3]))
    executor.move_blocks(BlockMoves(Move.SWAP_OUT, [3], [51]))
    executor.move_blocks(BlockMoves(Move.SWAP_IN, [50, 51], [5, 6]))
    want[2], want[5], want[6], want[3] = want[1], want[3], want[4], want[4]
    np.testing.assert_array_equal(contents(executor), want)


def test_the_later_of_two_transfers_to_a_host_block_stays(executor: JaxExecutor) -> None:
    want = fill(executor, 6)
    for block in range(1, 2 * MAX_ON_THE_WAY + 1):
        executor.move_blocks(BlockMoves(Move.SWAP_OUT, [block], [9]))
        assert len(executor._host.on_the_way) <= MAX_ON_THE_WAY
    executor.move_blocks(BlockMoves(Move.SWAP_IN, [9], [100]))
    want[100] = want[2 * MAX_ON_THE_WAY]
    np.testing.assert_array_equal(contents(executor), want)


def test_random_moves_agree_with_a_model_of_them(executor: JaxExecutor) -> None:
    rng = np.random.default_rng(8)
    device = fill(executor, 7)
    host = np.zeros((NUM_HOST_BLOCKS + 1, *device.shape[1:]), device.dtype)
    written: list[int] = []
    for _ in range(60):
        count = int(rng.integers(1, 13))
        move = Move(rng.choice([move.value for move in Move]))
        if move is Move.COPY:
            both = (rng.permutation(NUM_BLOCKS)[: 2 * count] + 1).tolist()
            sources, destinations = both[:count], both[count:]
            device[destinations] = device[sources]
        elif move is Move.SWAP_OUT:
            sources = (rng.permutation(NUM_BLOCKS)[:count] + 1).tolist()
            destinations = (rng.permutation(NUM_HOST_BLOCKS)[:count] + 1).tolist()
            host[destinations] = device[sources]
            written += destinations
        else:
            if not written:
                continue
            sources = rng.choice(written, count).tolist()
            destinations = (rng.permutation(NUM_BLOCKS)[:count] + 1).tolist()
            device[destinations] = host[sources]
        executor.move_blocks(BlockMoves(move, sources, destinations))
    np.testing.assert_array_equal(contents(executor), device)


def test_a_block_leaves_with_what_it_held_before_the_next_step(executor: JaxExecutor) -> None:
    """Swapped out and given to another sequence before anything has run, as the engine does."""
    driver = Driver(executor)
    sequence = driver.sequence([5, 7, 11, 13, 17, 19, 23, 29])
    block = sequence.blocks[0]
    executor.collect(driver.start([Row(sequence, 8)]))
    before = contents(executor)
    executor.move_blocks(BlockMoves(Move.SWAP_OUT, [block], [1]))
    sequence.tokens = [2, 3, 5, 7, 2, 3, 5, 7]
    handle = driver.start([Row(sequence, 8)])
    executor.move_blocks(BlockMoves(Move.SWAP_IN, [1], [sequence.blocks[1]]))
    executor.collect(handle)
    after = contents(executor)
    assert (after[block] != before[block]).any()
    np.testing.assert_array_equal(after[sequence.blocks[1]], before[block])


def test_collecting_a_step_lands_what_has_arrived(executor: JaxExecutor) -> None:
    driver = Driver(executor)
    executor.move_blocks(BlockMoves(Move.SWAP_OUT, [1, 2], [1, 2]))
    assert len(executor._host.on_the_way) == 1
    executor.collect(driver.start([Row(driver.sequence([1]), 1)]))
    assert len(executor._host.on_the_way) == 0


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        (BlockMoves(Move.COPY, [0], [1]), r"copy sources \[0\] are not blocks from 1 to 150"),
        (BlockMoves(Move.COPY, [1], [151]), r"copy destinations \[151\] are not blocks from 1 to 150"),
        (BlockMoves(Move.SWAP_OUT, [1], [101]), r"swap_out destinations \[101\] are not blocks from 1 to 100"),
        (BlockMoves(Move.SWAP_IN, [101], [1]), r"swap_in sources \[101\] are not blocks from 1 to 100"),
        (BlockMoves(Move.SWAP_IN, [1, 2], [1]), "2 source blocks have 1 dest"),
        (BlockMoves(Move.COPY, [1, 2], [3, 1]), "a copy reads a block that it writes"),
    ],
)
@pytest.mark.thinned(5)
def test_moves_that_name_no_block_are_refused_and_harm_nothing(
    executor: JaxExecutor, moves: BlockMoves, message: str
) -> None:
    want = fill(executor, 9)
    with pytest.raises(InternalError, match=message):
        executor.move_blocks(moves)
    np.testing.assert_array_equal(contents(executor), want)


def test_nothing_was_compiled_after_warm_up(executor: JaxExecutor) -> None:
    """Runs last in this file: after every move that the tests above made."""
    executor.move_blocks(BlockMoves(Move.COPY, [1], [2]))
    assert executor.num_compiles_after_warm_up == 0


def test_warming_up_measures_rates(executor: JaxExecutor) -> None:
    rates = executor.rates
    for rate in (rates.swap_out_bytes_per_s, rates.swap_in_bytes_per_s):
        assert 1e5 < rate < 1e13
    assert 1 < rates.prefill_tokens_per_s < 1e8


def test_without_host_memory_only_copies_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = dataclasses.replace(tiny_model.OPTIONS.cache, swap_space=0.0)
    options = dataclasses.replace(tiny_model.OPTIONS, cache=cache)
    executor = JaxExecutor.create(tiny_model.model(), tiny_model.params(), options)
    assert executor.geometry.num_host_blocks == 0
    kinds = {spec.kind for spec in executor._programs._sources}
    assert kinds == {"forward", "sample", "edited", "count", "tell", "decode", "copy"}
    for verb in ("pack", "forward", "sample"):
        monkeypatch.setattr(executor._runner, verb, lambda *arguments: None)
    rates = measure_rates(executor._runner, executor._mover, executor._programs, executor.geometry)
    assert rates.swap_out_bytes_per_s == rates.swap_in_bytes_per_s == NO_RATE
    with pytest.raises(InternalError, match="swap_out destinations"):
        executor.move_blocks(BlockMoves(Move.SWAP_OUT, [1], [1]))
    executor.shutdown()
    with pytest.raises(InternalError, match="shut down"):
        executor.move_blocks(BlockMoves(Move.COPY, [1], [2]))


# --- programs and sizes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", get_args(MoveKind))
def test_a_move_copies_no_pool(kind: MoveKind, dtype: str) -> None:
    layout = KVLayout(3, 4000, 16, 2, 16, np.dtype(dtype))
    executable = lower_move(ProgramSpec(kind, 8), layout, build_mesh(jax.devices()[:1])).compile()
    memory = executable.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == (0 if kind == "swap_out" else layout.num_bytes)
    assert memory.temp_size_in_bytes < layout.num_bytes // 10
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < layout.num_bytes // 10
    assert pool_sized_operations(executable, math.prod(layout.shape)) == set()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", get_args(MoveKind))
def test_what_is_moved_is_read_once_and_arranged_as_it_lies(kind: MoveKind, dtype: str) -> None:
    layout = KVLayout(3, 4000, 16, 2, 16, np.dtype(dtype))
    executable = lower_move(ProgramSpec(kind, 64), layout, build_mesh(jax.devices()[:1])).compile()
    memory = executable.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 1.1 * 64 * layout.bytes_per_block
    made = made_arrays(executable, {64 * math.prod(layout.block_shape)})
    assert [array.opcode for array in made] == ([] if kind == "swap_in" else ["gather"])


def test_a_move_takes_no_longer_with_a_larger_pool() -> None:
    """What memory_analysis cannot see: a backend that copies where the program does not say so.

    In seconds of this process's processors, which others on the machine take nothing from.
    """

    def seconds(num_blocks: int) -> float:
        layout = KVLayout(2, num_blocks, 16, 2, 32, np.dtype("float32"))
        mesh = build_mesh(jax.devices()[:1])
        executable = lower_move(ProgramSpec("copy", 8), layout, mesh).compile()
        pool = jax.device_put(np.zeros(layout.shape, layout.storage_dtype), replicated(mesh))
        pair = np.arange(16, dtype=np.int32).reshape(2, 8)
        quickest = float("inf")
        for _ in range(10):
            begin = time.process_time()
            pool = executable(pool, pair)
            pool.block_until_ready()
            quickest = min(quickest, time.process_time() - begin)
        return quickest

    assert seconds(8000) < 10 * seconds(100) + 1e-3  # 262 MB, whose copy takes 30 ms and more


@pytest.mark.parametrize(
    ("num_blocks", "block_bytes", "sizes"),
    [
        (1, 1 << 10, (8,)),
        (8, 1 << 10, (8,)),
        (9, 1 << 10, (8, 64)),
        (500, 1 << 10, (8, 64, 512)),
        (500, 1 << 18, (8, 64)),
        (500, 1 << 20, (8,)),
        (500, 1 << 23, (8,)),
    ],
)
def test_sizes_follow_the_pool_and_the_weight_of_a_block(
    num_blocks: int, block_bytes: int, sizes: tuple[int, ...]
) -> None:
    layout = KVLayout(1, num_blocks, 1, 1, block_bytes // 8, np.dtype("float32"))
    assert layout.bytes_per_block == block_bytes
    assert move_sizes(layout) == sizes
    assert content_bytes(layout) >= sizes[-1] * block_bytes


def test_swap_space_becomes_blocks_of_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KVLayout(1, 10, 16, 2, 32, np.dtype("float32"))
    monkeypatch.setattr(transfers, "physical_host_bytes", lambda: 2**30)
    assert num_host_blocks(0.0, layout) == 0
    assert num_host_blocks(1.0, layout) == 2**30 // layout.bytes_per_block
    assert num_host_blocks(2.5 * layout.bytes_per_block / 2**30, layout) == 2
    with pytest.raises(InvalidArgument, match=r"swap_space: 1.5 GiB; the host has 1.00 GiB"):
        num_host_blocks(1.5, layout)


def test_host_memory_is_taken_as_it_is_used() -> None:
    """A gibibyte of swap space costs nothing until something is swapped."""
    layout = KVLayout(1, 10, 16, 2, 32, np.dtype("float32"))
    begin = time.process_time()
    pool = HostPool(layout, 2**30 // layout.bytes_per_block, replicated(build_mesh(jax.devices()[:1])))
    assert time.process_time() - begin < 0.1
    assert pool.num_blocks == 2**30 // layout.bytes_per_block


def test_an_accelerator_writes_to_page_locked_memory_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same transfers through the memory kind that accelerators have; CPUs have it too, and no use for it."""
    monkeypatch.setattr(transfers, "_staging_sharding", lambda sharding: sharding.with_memory_kind("pinned_host"))
    layout = KVLayout(2, 10, 4, 1, 8, np.dtype("bfloat16"))
    sharding = replicated(build_mesh(jax.devices()[:1]))
    pool = HostPool(layout, 20, sharding)
    sent = np.random.default_rng(0).integers(0, 2**16, (2, 8, *layout.block_shape), np.uint16)
    arrays = [jax.device_put(contents, sharding) for contents in sent]
    num_before = told.num_compiled
    pool.receive(arrays[0], [1, 2, 3])
    pool.receive(arrays[1], [3, 20])
    assert pool.on_the_way[0].contents.sharding.memory_kind == "pinned_host"
    got = pool.read([20, 3, 1], 4)
    np.testing.assert_array_equal(got[:3], [sent[1][1], sent[1][0], sent[0][0]])
    assert (len(pool.on_the_way), told.num_compiled) == (0, num_before)


def test_host_memory_that_the_system_refuses_is_an_option_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "empty", refuse)
    layout = KVLayout(1, 10, 16, 2, 32, np.dtype("float32"))
    with pytest.raises(InvalidArgument, match=r"swap_space: cannot allocate 0.00 GiB of host memory"):
        HostPool(layout, 5, replicated(build_mesh(jax.devices()[:1])))


def test_the_options_of_config_resolve_to_a_geometry() -> None:
    executor = JaxExecutor.create(
        tiny_model.model(),
        tiny_model.params(),
        EngineConfig.load({"num_blocks": 1, "max_num_seqs": 4, "wait_for_all_programs": True}),
    )
    assert executor.geometry.num_blocks == 1
    assert executor.geometry.num_host_blocks == 2**30 // executor.geometry.bytes_per_block
    executor.shutdown()


def test_host_blocks_are_bytes_that_can_be_read_and_written(executor: JaxExecutor) -> None:
    """What is swapped out is read as bytes, and bytes that were written are swapped in as they are."""
    before, host = fill(executor, 21), executor.host_blocks
    assert host is not None
    executor.move_blocks(BlockMoves(Move.SWAP_OUT, [5, 9], [1, 2]))
    executor._mover.wait()
    assert host.have_landed([1, 2])
    for block_id, home in ((5, 1), (9, 2)):
        assert bytes(host.view(home)) == before[block_id].tobytes()
        assert len(host.view(home)) == host.bytes_per_block
    written = np.random.default_rng(3).integers(0, 255, host.bytes_per_block, np.uint8)
    host.view(7)[:] = written.data
    executor.move_blocks(BlockMoves(Move.SWAP_IN, [7], [11]))
    assert contents(executor)[11].tobytes() == written.tobytes()
    for wrong in (0, -1, NUM_HOST_BLOCKS + 1):
        with pytest.raises(InternalError, match=f"host block {wrong} is not from 1 to {NUM_HOST_BLOCKS}"):
            host.view(wrong)


class Slow:
    """A transfer that does not arrive."""

    def is_ready(self) -> bool:
        return False


def test_a_block_has_landed_when_nothing_is_on_its_way_to_it() -> None:
    """Transfers that have not arrived are not waited for, and those to other blocks do not count."""
    layout = KVLayout(num_layers=1, num_blocks=4, block_size=8, num_kv_heads=1, head_dim=8, dtype=np.dtype("float32"))
    sharding = replicated(build_mesh(jax.devices()[:1]))
    pool = HostPool(layout, 4, sharding)
    host = WholeHostBlocks(pool, lambda: b"", BlockPlace(layout, sharding), lambda block_ids: iter(()))
    contents_2 = jax.numpy.ones((2, *layout.block_shape), "float32")
    slow: Any = Slow()

    pool.receive(contents_2, [1, 2])
    pool.on_the_way[0] = dataclasses.replace(pool.on_the_way[0], contents=slow)
    assert not host.have_landed([2, 3])
    assert host.have_landed([3, 4])
    pool.on_the_way[0] = dataclasses.replace(pool.on_the_way[0], contents=contents_2)
    pool.land_all()
    assert host.have_landed([1, 2])
    assert bytes(host.view(2)) == np.asarray(contents_2[1]).tobytes()
    pool.receive(contents_2, [1, 2])
    pool.release()
    assert host.have_landed([1, 2])
    pool.land_all()


def _identity(params: Params | None = None, dtype: str = "float32", **cache: Any) -> bytes:
    options = dataclasses.replace(
        tiny_model.OPTIONS, cache=dataclasses.replace(tiny_model.OPTIONS.cache, num_blocks=8, **cache)
    )
    executor = JaxExecutor.create(tiny_model.model(dtype), params or tiny_model.params("loop", dtype), options)
    try:
        assert executor.host_blocks is not None
        return executor.host_blocks.kv_identity()
    finally:
        executor.shutdown()


def test_an_identity_is_of_all_that_the_bytes_of_a_block_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same again, whatever the cache does; another with one weight, type, block, pool, program or processor."""
    leaves, tree = jax.tree.flatten(tiny_model.params("loop", "float32"))
    leaves[-1] = leaves[-1].at[(0,) * leaves[-1].ndim].add(1e-3)
    size = tiny_model.OPTIONS.cache.block_size
    assert size is not None
    same = _identity()
    assert _identity(enable_prefix_caching=False) == same
    others = [
        _identity(jax.tree.unflatten(tree, leaves)),
        _identity(dtype="bfloat16"),
        _identity(block_size=2 * size),
        _identity(kv_cache_dtype="int8"),
    ]
    for what in ("processor_features", "digest_of_sources"):
        with monkeypatch.context() as patch:
            patch.setattr(executable_cache, what, lambda: "another")
            others.append(_identity())
    assert len({same, *others}) == 7


def test_an_identity_is_of_the_type_of_activations() -> None:
    step, _, _ = abstract_serving(tiny_model.model(), tiny_model.OPTIONS, serving_mesh(1), "loop")
    params = tiny_model.params("loop", "float32")
    other = dataclasses.replace(step, activation_dtype="int8")
    assert executable_cache.kv_fingerprint(step, params) != executable_cache.kv_fingerprint(other, params)


_STAGING = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
jax.config.update("jax_cpu_collectives_implementation", "gloo")
port, process = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process), cluster_detection_method="deactivate")
from jpaged.device.compilation.compile import told
from jpaged.device.transfers import AddressableShards, copy_to
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("model",)), PartitionSpec(None, "model"))
whole = np.arange(24, dtype=np.float32).reshape(3, 8)
array = jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
num_before = told.num_compiled
copy = copy_to(array, sharding.with_memory_kind("pinned_host"))
local = AddressableShards(sharding).to_host(copy)
assert copy.sharding.memory_kind == "pinned_host", copy.sharding
begin = 4 * int(process)
assert np.array_equal(local, whole[:, begin : begin + 4]), local
assert told.num_compiled == num_before, f"{told.num_compiled - num_before} programs were compiled"
"""


@pytest.mark.long
def test_blocks_of_two_processes_are_staged_without_a_compilation() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _STAGING, str(port), str(process)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
