"""The programs of a mesh, read off what the compiler makes of them, and what each device holds."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter

import jax
import numpy as np
import pytest

from jpaged.checkpoints.weights import random_params
from jpaged.config import EngineConfig
from jpaged.device.aot.hlo import collectives
from jpaged.device.executor import JaxExecutor
from jpaged.device.mesh import MODEL_AXIS, build_mesh
from jpaged.device.programs.compile import ProgramSpec
from jpaged.device.programs.lowering import abstract_serving, program_lowerings
from jpaged.device.step import products
from jpaged.device.transfers import lower_move
from jpaged.engine.executor import Detail
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.kernels.product.on_device import PartedMatrix
from jpaged.models.model import Model
from jpaged.models.quantisation.rules import Quantisation
from jpaged.models.stack import LayerMode
from tests.device.programs.hlo import pool_sized_operations
from tests.device.sharded import model_of, place

OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "num_blocks": 2000}


def opcodes(executable: jax.stages.Compiled) -> Counter[str]:
    """How many exchanges of each kind there are; a loop's once."""
    return Counter(found.opcode for found in collectives(executable))


@pytest.mark.parametrize(("name", "layer_mode"), [("llama3_tied", "loop"), ("opt", "scan")])
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
    monkeypatch.setattr(products, "kernel_takes", lambda matrix, device: True)
    form = MatrixFormat("int4", 32, has_zeros=True)
    published = model_of("llama3_tied")
    config = dataclasses.replace(published.config, quantisation=Quantisation("int4", (("", form),)))
    where = place(Model(config, published.dtype), 2, "loop")
    marked = products.in_parts(where.abstract_params(), where.model, "loop", where.mesh)
    leaves = jax.tree.leaves(marked["layers"], is_leaf=lambda leaf: isinstance(leaf, PartedMatrix))
    found = [leaf for leaf in leaves if isinstance(leaf, PartedMatrix)]
    assert len(found) == 4 * config.num_layers
    for parted in found:
        as_they_lie = jax.tree.map(lambda array: array.sharding.spec, parted.matrix)
        assert parted.specs == as_they_lie
    assert {spec[0] for spec in (parted.specs.values for parted in found)} == {None, MODEL_AXIS}
    on_one = place(Model(config, published.dtype), 1, "loop")
    alone = on_one.abstract_params()
    assert products.in_parts(alone, on_one.model, "loop", on_one.mesh) is alone
