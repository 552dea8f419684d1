"""The programs of a mesh, read off what the compiler makes of them, and what each device holds."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints.weights import random_params
from jpaged.config import EngineConfig
from jpaged.device import sharded_matmul
from jpaged.device.aot.deployment import collectives
from jpaged.device.compilation.compile import COUNT, TELLS, ProgramSpec
from jpaged.device.compilation.lowering import abstract_serving, program_lowerings
from jpaged.device.executor import JaxExecutor
from jpaged.device.logits_processors import IN_PROMPT
from jpaged.device.mesh import MODEL_AXIS, build_mesh
from jpaged.device.transfers import lower_move
from jpaged.engine.executor import TOP_WIDTH, Detail
from jpaged.engine.executor.aux_io import AUX_IDS, AuxKind
from jpaged.engine.executor.io import TokenCountReset
from jpaged.kernels.matmul.on_device import PartedMatrix
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.models.config import Quantization
from jpaged.models.model import Model
from jpaged.models.stack import LayerMode
from jpaged.models.tokens import TokenBatch
from jpaged.plan.known_models import KNOWN_MODELS
from tests.device.compilation.hlo import pool_sized_operations
from tests.device.sharded import model_of, place

OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "num_blocks": 2000}


def opcodes(executable: jax.stages.Compiled) -> Counter[str]:
    """How many exchanges of each kind there are; a loop's once."""
    return Counter(found.opcode for found in collectives(executable))


@pytest.mark.parametrize(("name", "layer_mode"), [("llama3_tied", "loop"), ("opt", "scan")])
@pytest.mark.thinned(2)
def test_a_step_sums_twice_a_layer_and_moves_nothing_else(name: str, layer_mode: LayerMode) -> None:
    """One sum for the embedding, and for attention and feed-forward of each layer; a scan has its layer once."""
    where = place(model_of(name), 4, layer_mode)
    step, geometry, params = abstract_serving(model_of(name), EngineConfig.load(OPTIONS), where.mesh, layer_mode)
    lowerings = program_lowerings(step, params, geometry)
    layout = step.layout
    executable = lowerings[ProgramSpec("forward", 16)]().compile()
    num_layers = 1 if layer_mode == "scan" else layout.num_layers
    assert opcodes(executable) == {"all-reduce": 2 * num_layers + 1}
    memory = executable.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == layout.local.num_bytes == layout.num_bytes // 4
    assert memory.temp_size_in_bytes < layout.local.num_bytes // 10
    assert pool_sized_operations(executable, math.prod(layout.local.shape)) == set()
    sample = lowerings[ProgramSpec("sample", 8, detail=Detail.TOP_LOGPROBS)]().compile()
    assert opcodes(sample)["all-gather"] == 2  # of the best few of each device
    widths = re.findall(r"all-gather\S*\(\w+\[(\d+),(\d+)\]", sample.as_text() or "")
    assert all(int(width) <= 32 for _, width in widths)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tiny states have two parts."""
    monkeypatch.setattr(sharded_matmul, "_LEAST_STATES", {2: 1})
    monkeypatch.setattr(sharded_matmul, "_CHUNK_WEIGHTS", 1)
    monkeypatch.setattr(sharded_matmul, "_LANES", 1)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("num_chunks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_states_in_parts_are_summed_part_by_part(num_chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sums for each part of each chunk of rows, and one for the embedding; the pool stays in place."""
    monkeypatch.setattr(sharded_matmul, "_CHUNK_ROWS", 16 // num_chunks)
    model, options = model_of("llama3_tied"), EngineConfig.load(OPTIONS)
    step, geometry, params = abstract_serving(model, options, build_mesh(jax.devices()[:4]), "scan")
    lowering = program_lowerings(dataclasses.replace(step, overlaps_sums=True), params, geometry)
    executable = lowering[ProgramSpec("forward", 16)]().compile()
    exchanged = [(one.opcode, dims) for one in collectives(executable) for dims in one.dims]
    width = step.model.config.hidden_size
    of_part = ("all-reduce", (16 // num_chunks, width // 2))
    assert Counter(exchanged) == {of_part: 4 * num_chunks, ("all-reduce", (16, width)): 1}
    memory = executable.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == step.layout.local.num_bytes
    assert pool_sized_operations(executable, math.prod(step.layout.local.shape)) == set()


@pytest.mark.long
@pytest.mark.parametrize("num_row_chunks", [1, 2])
@pytest.mark.parametrize("name", ["qwen3_tied", "llama3_tied"])
def test_a_row_in_parts_has_its_bits_wherever_it_is(name: str, num_row_chunks: int) -> None:
    """Four devices sum; the other rows and the row's place have no effect, and greedy tokens are those of whole states.

    Programs of other sizes may differ in the last bits, with parts or without: XLA for CPUs orders sums by size.
    """
    model = model_of(name)
    where = place(model, 4, "scan")
    params = random_params(where.model, "scan", seed=0, shardings=where.shardings)
    config = where.model.config

    def attend(q_thd, k_tkd, v_tkd, carry, place, sinks_h=None):
        return q_thd + jnp.repeat(v_tkd, config.num_heads // config.num_kv_heads, axis=1), carry

    @functools.partial(jax.jit, static_argnums=1)
    def run(ids_t: jax.Array, num_column_parts: int) -> tuple[jax.Array, jax.Array]:
        positions = jnp.full(len(ids_t), 7)
        num_chunks = num_row_chunks if num_column_parts > 1 else 1
        sizes: dict[str, Any] = {"num_column_parts": num_column_parts, "num_row_chunks": num_chunks}
        tokens = TokenBatch(ids_t, positions, positions + 1, **sizes)
        hidden_te, _ = where.model.run(params, tokens, attend, (), "scan")
        return hidden_te, where.model.logits(params, hidden_te).argmax(-1)

    ids = np.random.default_rng(0).integers(0, 131, 16).astype(np.int32)
    hidden_te, greedy_t = run(ids, 2)
    order = np.random.default_rng(1).permutation(16)
    np.testing.assert_array_equal(run(ids[order], 2)[0], hidden_te[order])
    np.testing.assert_array_equal(run(np.append(ids[:4], ids[:12] * 0), 2)[0][:4], hidden_te[:4])
    whole_te, of_whole_t = run(ids, 1)
    np.testing.assert_allclose(hidden_te, whole_te, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(greedy_t, of_whole_t)


def test_states_have_parts_where_matmuls_hide_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    def overlaps(
        name: str,
        num_devices: int = 8,
        *,
        kind: str = "TPU v6 lite",
        num_contexts: int = 1,
        dtype: Any = jnp.bfloat16,
        layer_mode: LayerMode = "scan",
        has_adapters: bool = False,
    ) -> bool:
        model = Model(KNOWN_MODELS[name].config, np.dtype(dtype))
        mesh = build_mesh(jax.devices()[:num_devices], num_contexts)
        monkeypatch.setattr(sharded_matmul, "first_device", lambda mesh: types.SimpleNamespace(device_kind=kind))
        return sharded_matmul.overlaps_sums(model, layer_mode, mesh, has_adapters=has_adapters)

    assert overlaps("llama-3-70b")
    assert overlaps("llama-3-8b", 4)
    assert not overlaps("llama-3-8b", 8)
    assert not overlaps("llama-3-8b", 1)
    assert not overlaps("opt-13b", 2)
    assert overlaps("llama-3-70b", kind="TPU v5")
    assert not overlaps("llama-3-70b", kind="TPU v5 lite")
    assert not overlaps("llama-3-70b", kind="NVIDIA H200")
    assert not overlaps("llama-3-70b", num_contexts=2)
    assert not overlaps("llama-3-70b", layer_mode="loop")
    assert not overlaps("llama-3-70b", has_adapters=True)
    assert not overlaps("llama-3-70b", dtype=jnp.float16)
    parts = {(t, e): sharded_matmul.num_column_parts(t, e) for t in (32, 64, 512) for e in (4096, 8192, 8064)}
    few, some, many = ({t: parts[t, e] for t in (32, 64, 512)} for e in (8064, 4096, 8192))
    assert few == {32: 1, 64: 1, 512: 1}  # columns that parts cannot share
    assert some == {32: 1, 64: 1, 512: 2}
    assert many == {32: 1, 64: 2, 512: 4}
    llama_70b, llama_8b = (
        sharded_matmul.count_layer_weights(KNOWN_MODELS[name].config, num_devices)
        for name, num_devices in (("llama-3-70b", 8), ("llama-3-8b", 4))
    )
    chunks = [sharded_matmul.num_row_chunks(num, llama_70b) for num in (512, 1024, 2046, 2048, 2049, 8192)]
    assert chunks == [1, 1, 1, 2, 1, 2]
    assert sharded_matmul.num_row_chunks(8192, llama_8b) == 1


@pytest.mark.parametrize(("num_contexts", "num_parts"), [(4, 1), (2, 2)])
@pytest.mark.thinned(2)
def test_contexts_in_parts_cost_two_exchanges_a_layer(num_contexts: int, num_parts: int) -> None:
    """Log-sum-exp of each head from every device, and one sum of outputs in float32; weights and pool stay in place."""
    mesh = build_mesh(jax.devices()[: num_contexts * num_parts], num_contexts)
    step, geometry, params = abstract_serving(model_of("llama3_tied"), EngineConfig.load(OPTIONS), mesh, "loop")
    layout, config = step.layout, step.model.config
    lowerings = program_lowerings(step, params, geometry)
    executable = lowerings[ProgramSpec("forward", 16)]().compile()
    of_model = 2 * config.num_layers + 1 if num_parts > 1 else 0
    assert opcodes(executable) == {"all-reduce": of_model + config.num_layers, "all-gather": config.num_layers}
    num_heads = config.num_heads // num_parts
    exchanged = [(one.opcode, math.prod(dims)) for one in collectives(executable) for dims in one.dims]
    assert exchanged.count(("all-gather", num_contexts * 16 * num_heads)) == config.num_layers
    assert exchanged.count(("all-reduce", 16 * num_heads * config.head_dim)) >= config.num_layers
    memory = executable.memory_analysis()
    assert memory is not None
    in_parts = num_contexts * num_parts
    assert memory.alias_size_in_bytes == layout.local.num_bytes == layout.num_bytes // in_parts
    assert pool_sized_operations(executable, math.prod(layout.local.shape)) == set()
    for kind in ("copy", "swap_out", "swap_in"):
        moved = lower_move(ProgramSpec(kind, 8), layout, mesh).compile()
        assert collectives(moved) == []


@pytest.mark.long
@pytest.mark.parametrize("num_parts", [1, 2])
def test_stages_pass_states_on_and_update_the_pool_in_place(num_parts: int) -> None:
    """One exchange for each turn, and one for the states of the last stage; moves of blocks have none."""
    model = model_of("llama3_tied")
    num_stages = model.config.num_layers
    mesh = build_mesh(jax.devices()[: num_stages * num_parts], 1, num_stages)
    step, geometry, params = abstract_serving(model, EngineConfig.load(OPTIONS), mesh)
    executable = program_lowerings(step, params, geometry)[ProgramSpec("forward", 16)]().compile()
    counts = opcodes(executable)
    assert counts["collective-permute"] == 1
    assert num_parts > 1 or counts == {"collective-permute": 1, "all-reduce": 1}
    memory, layout = executable.memory_analysis(), step.layout
    assert memory is not None
    assert memory.alias_size_in_bytes == layout.local.num_bytes == layout.num_bytes // (num_stages * num_parts)
    assert pool_sized_operations(executable, math.prod(layout.local.shape)) == set()
    for kind in ("copy", "swap_out", "swap_in"):
        assert collectives(lower_move(ProgramSpec(kind, 8), layout, mesh).compile()) == []


@pytest.mark.long
@pytest.mark.parametrize("num_parts", [2, 4])
def test_what_edits_and_tells_is_split_over_the_vocabulary(num_parts: int) -> None:
    """A device counts its own tokens, in place; none sees the logits of another but the best few of each row."""
    where = place(model_of("llama3_tied"), num_parts, "loop")
    step, geometry, params = abstract_serving(model_of("llama3_tied"), EngineConfig.load(OPTIONS), where.mesh, "loop")
    vocab_size, num_slots = step.model.config.vocab_size, OPTIONS["max_num_seqs"] + 1
    counts = step.abstract_counts(OPTIONS["max_num_seqs"])
    assert counts.counts_pv.sharding.shard_shape(counts.counts_pv.shape) == (num_slots, vocab_size // num_parts)
    lowerings = program_lowerings(step, params, geometry)
    edited = next(spec for spec in lowerings if spec.kind == "edited")
    for spec in (edited, COUNT, *TELLS.values()):
        executable = lowerings[spec]().compile()
        exchanged = collectives(executable)
        gathered = [math.prod(dims) for one in exchanged if one.opcode != "all-reduce" for dims in one.dims]
        has_top = spec.kind == "edited" or spec == TELLS[AuxKind.LOGPROBS]
        best = spec.size * num_parts * min(TOP_WIDTH, vocab_size // num_parts)
        assert gathered == ([best, best] if has_top else []), spec
        summed = [math.prod(dims) for one in exchanged if one.opcode == "all-reduce" for dims in one.dims]
        assert all(size <= spec.size * AUX_IDS for size in summed), spec
        memory = executable.memory_analysis()
        assert memory is not None
        in_place = num_slots * (2 * vocab_size // num_parts + 4) if spec.kind in ("edited", "count") else 0
        assert memory.alias_size_in_bytes == in_place, spec


@pytest.mark.long
def test_each_device_holds_the_counts_of_its_own_tokens() -> None:
    where = place(model_of("llama3_tied"), 2)
    params = random_params(where.model, where.layer_mode, seed=0, shardings=where.shardings)
    executor = JaxExecutor.create(model_of("llama3_tied"), params, EngineConfig.load(OPTIONS), mesh=where.mesh)
    executor.warm_up(lambda what, done, total: None)
    padded, num_slots = where.model.config.vocab_size, OPTIONS["max_num_seqs"] + 1
    tokens = [0, 3, 3, padded // 2 - 1, padded // 2, padded // 2]
    executor._runner._count(TokenCountReset(2, tokens, 3))
    shards = executor._runner._counts.counts_pv.addressable_shards
    assert [shard.data.shape for shard in shards] == [(num_slots, padded // 2)] * 2
    first, second = (np.asarray(shard.data)[2] for shard in shards)
    assert np.flatnonzero(first).tolist() == [0, 3, padded // 2 - 1]
    assert (first[0], first[3], first[-1]) == (IN_PROMPT, IN_PROMPT, 1)
    assert np.flatnonzero(second).tolist() == [0]
    assert second[0] == 2
    executor.shutdown()


@pytest.mark.parametrize("kind", ["copy", "swap_out", "swap_in"])
def test_every_device_moves_its_own_part_of_a_block(kind) -> None:
    step, _, _ = abstract_serving(model_of("llama3_tied"), EngineConfig.load(OPTIONS), build_mesh(jax.devices()[:4]))
    layout = step.layout
    executable = lower_move(ProgramSpec(kind, 8), layout, step.mesh).compile()
    assert opcodes(executable) == {}
    memory = executable.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == (0 if kind == "swap_out" else layout.local.num_bytes)
    assert pool_sized_operations(executable, math.prod(layout.local.shape)) == set()


@pytest.mark.long
def test_a_device_holds_its_share_of_the_model_and_the_pool() -> None:
    """Norms and the biases that are added to sums are whole; all else of the weights is split, and so is the pool."""
    model = model_of("qwen3_tied")
    held = {}
    for num_parts in (1, 4):
        where = place(model, num_parts)
        params = random_params(where.model, where.layer_mode, seed=0, shardings=where.shardings)
        options = EngineConfig.load({**OPTIONS, "linear_backend": "xla"})  # packed columns are filled up
        executor = JaxExecutor.create(model, params, options, mesh=where.mesh)
        arrays = jax.tree.leaves((executor._runner._params, executor._pool._array))
        assert all(len(leaf.addressable_shards) == num_parts for leaf in arrays)
        held[num_parts] = sum(leaf.addressable_shards[-1].data.nbytes for leaf in arrays)
        executor.shutdown()
    assert held[1] / 4 < held[4] < held[1] / 3.5


def test_shapes_alone_are_enough_to_lower() -> None:
    """As many blocks as the longest sequence needs, scales of the pool included, and no array is made."""
    options = EngineConfig.load({"max_model_len": 64, "kv_cache_dtype": "int8", "max_num_seqs": 8})
    step, geometry, params = abstract_serving(model_of("mistral_mqa"), options, build_mesh(jax.devices()))
    assert geometry.num_blocks == 4
    assert geometry.vocab_size == 131
    assert params["embed"]["embedding"].shape == (136, step.model.config.hidden_size)
    assert params["kv_scales"].shape == (3, 8, 2)
    text = program_lowerings(step, params, geometry)[ProgramSpec("forward", 8)]().as_text()
    assert "num_partitions = 8" in text
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))
    assert np.prod(params["kv_scales"].sharding.shard_shape((3, 8, 2))) == 6


def test_a_kernel_is_told_the_parts_of_each_dense_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they lie: a device's own heads and columns, and the scales of its groups."""
    monkeypatch.setattr(sharded_matmul, "kernel_takes", lambda matrix, device: True)
    form = MatrixFormat("int4", 32, has_zeros=True)
    published = model_of("llama3_tied")
    config = dataclasses.replace(published.config, quantization=Quantization("int4", (("", form),)))
    where = place(Model(config, published.dtype), 2, "loop")
    marked = sharded_matmul.in_parts(where.abstract_params(), where.model, "loop", where.mesh)
    leaves = jax.tree.leaves(marked["layers"], is_leaf=lambda leaf: isinstance(leaf, PartedMatrix))
    found = [leaf for leaf in leaves if isinstance(leaf, PartedMatrix)]
    assert len(found) == 4 * config.num_layers
    for parted in found:
        as_they_lie = jax.tree.map(lambda array: array.sharding.spec, parted.matrix)
        assert parted.specs == as_they_lie
    assert {spec[0] for spec in (parted.specs.values for parted in found)} == {None, MODEL_AXIS}
    on_one = place(Model(config, published.dtype), 1, "loop")
    alone = on_one.abstract_params()
    assert sharded_matmul.in_parts(alone, on_one.model, "loop", on_one.mesh) is alone
