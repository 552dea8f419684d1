"""No step copies the pool: read off the compiled programs, for every kind of step, layout and layer mode."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from jpaged.config import EngineConfig, LinearBackend
from jpaged.device.compilation.compile import ProgramSpec
from jpaged.device.compilation.lowering import program_lowerings, sized_step
from jpaged.device.linear import params_for
from jpaged.device.mesh import MeshPlacement, build_mesh
from jpaged.engine.executor import Detail
from jpaged.models.decoder.config import apply_lossy_window
from jpaged.models.model import Model
from jpaged.models.stack import LayerMode
from tests.device import tiny_model
from tests.device.compilation.hlo import pool_sized_operations

NUM_ROWS = 8


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("num_tokens", "block_size", "dtype", "layer_mode"),
    [
        (8, 16, "float32", "loop"),
        (64, 16, "float32", "loop"),
        (8, 1, "float32", "loop"),
        (16, 32, "float32", "loop"),
        (8, 16, "bfloat16", "loop"),
        (64, 8, "bfloat16", "loop"),
        (8, 16, "float32", "scan"),
        (64, 16, "bfloat16", "scan"),
    ],
)
def test_the_pool_is_updated_in_place(num_tokens: int, block_size: int, dtype: str, layer_mode: LayerMode) -> None:
    options = EngineConfig.load(
        {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": block_size, "max_model_len": 64}
    )
    num_blocks = 32_000 // block_size
    mesh = build_mesh(jax.devices()[:1])
    step, geometry = sized_step(tiny_model.model(dtype), options, layer_mode, num_blocks, mesh)
    layout = step.layout
    params = MeshPlacement.of(tiny_model.model(dtype), mesh, layer_mode).abstract_params()
    executable = program_lowerings(step, params, geometry)[ProgramSpec("forward", num_tokens)]().compile()
    memory = executable.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == layout.num_bytes
    assert memory.temp_size_in_bytes < layout.num_bytes // 10
    assert pool_sized_operations(executable, math.prod(layout.shape)) == set()


@pytest.mark.long
@pytest.mark.parametrize("num_tokens", [8, 64])
def test_a_second_pass_over_first_tokens_copies_no_pool(num_tokens: int) -> None:
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    options = EngineConfig.load({**given, "lossy_kv_window": 20, "attention_backend": "xla"})
    model, mesh = tiny_model.model("float32"), build_mesh(jax.devices()[:1])
    model = dataclasses.replace(model, config=apply_lossy_window(model.config, options))
    step, geometry = sized_step(model, options, "scan", 2000, mesh)
    params = MeshPlacement.of(model, mesh, "scan").abstract_params()
    executable = program_lowerings(step, params, geometry)[ProgramSpec("forward", num_tokens)]().compile()
    memory = executable.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == step.layout.num_bytes
    assert memory.temp_size_in_bytes < step.layout.num_bytes // 10
    assert pool_sized_operations(executable, math.prod(step.layout.shape)) == set()


@pytest.mark.thinned(5)
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    ("dtype", "layer_mode", "linear_backend"),
    [("float32", "loop", "xla"), ("bfloat16", "scan", "xla"), ("bfloat16", "loop", "cpu")],
)
def test_several_steps_update_the_pool_in_place_and_copy_no_weight(
    dtype: str, layer_mode: LayerMode, linear_backend: LinearBackend, is_tied: bool
) -> None:
    """The embedding is the largest weight; nothing else is of its size, nor of a quarter of it."""
    options = EngineConfig.load({"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64})
    mesh = build_mesh(jax.devices()[:1])
    config = dataclasses.replace(tiny_model.CONFIG, vocab_size=19_968, tie_word_embeddings=is_tied)
    model = Model(config, jnp.dtype(dtype))
    step, geometry = sized_step(model, options, layer_mode, 2000, mesh)
    step = dataclasses.replace(step, linear_backend=linear_backend)
    params = params_for(step, MeshPlacement.of(model, mesh, layer_mode).abstract_params())
    executable = program_lowerings(step, params, geometry)[ProgramSpec("decode", NUM_ROWS)]().compile()
    memory, pool = executable.memory_analysis(), step.layout
    assert memory is not None
    assert memory.alias_size_in_bytes == pool.num_bytes
    num_weights = config.vocab_size * config.hidden_size
    num_logits = NUM_ROWS * config.vocab_size
    num_other_bytes = 250_000
    assert memory.temp_size_in_bytes < 4 * num_logits + num_other_bytes < model.dtype.itemsize * num_weights
    assert pool_sized_operations(executable, math.prod(pool.shape)) == set()
    assert pool_sized_operations(executable, num_weights) == set()


@pytest.mark.thinned(5)
@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("detail", list(Detail))
def test_a_sample_copies_no_logits(detail: Detail, num_devices: int) -> None:
    """The sizes are such that nothing is as large as logits: no weight, and no top log-probabilities."""
    num_rows, options = 24, EngineConfig.load({"max_num_seqs": 24, "max_num_batched_tokens": 24, "max_model_len": 64})
    mesh, config = build_mesh(jax.devices()[:num_devices]), dataclasses.replace(tiny_model.CONFIG, vocab_size=397)
    model = MeshPlacement.of(Model(config, jnp.dtype("float32")), mesh, "loop").model
    step, geometry = sized_step(model, options, "loop", 64, mesh)
    params = MeshPlacement.of(model, mesh, "loop").abstract_params()
    spec = ProgramSpec("sample", num_rows, detail=detail)
    executable = program_lowerings(step, params, geometry)[spec]().compile()
    made = pool_sized_operations(executable, num_rows * model.config.vocab_size // num_devices)
    assert made  # of this size there are some
    assert not {opcode for opcode in made if opcode.startswith("copy")}


def test_the_check_sees_a_copy() -> None:
    pool = jax.ShapeDtypeStruct((100, 8), jnp.float32)

    def write(pool: jax.Array) -> jax.Array:
        return pool.at[3].set(1.0)

    kept = jax.jit(write).lower(pool).compile()
    donated = jax.jit(write, donate_argnums=0).lower(pool).compile()
    assert pool_sized_operations(kept, 800) == {"copy"}
    assert pool_sized_operations(donated, 800) == set()


def test_the_check_sees_a_conversion() -> None:
    executable = (
        jax.jit(lambda pool: pool.astype(jnp.float32)).lower(jax.ShapeDtypeStruct((100, 8), "bfloat16")).compile()
    )
    assert pool_sized_operations(executable, 800) == {"convert"}
