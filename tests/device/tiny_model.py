"""A model small enough to compile in a second, and the executor that most tests share."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jpaged.config import EngineConfig, StartupOptions
from jpaged.device.executor import JaxExecutor
from jpaged.models.decoder import DecoderConfig
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.models.rope_config import RopeConfig
from jpaged.models.stack import LayerMode
from tests.on_demand import programs_on_demand

CONFIG = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    ropes=(RopeConfig(),),
    max_position_embeddings=96,
)

OPTIONS = EngineConfig.load(
    {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "num_blocks": 56,
        "block_size": 8,
        "max_model_len": 64,
        "swap_space": 40 * 6144 / 2**30,
        "wait_for_all_programs": True,
    }
)

WITHOUT_WAITING = dataclasses.replace(OPTIONS, startup=StartupOptions(wait_for_all_programs=False))


def model(dtype: str = "float32") -> Model:
    return Model(CONFIG, jnp.dtype(dtype))


@functools.cache
def params(layer_mode: LayerMode = "loop", dtype: str = "float32", of: Model | None = None) -> Params:
    """Ten times the usual standard deviation, so that logits differ enough for every position to matter."""

    def enlarge(path: tuple, leaf: jax.Array) -> jax.Array:
        return leaf if "scale" in jax.tree_util.keystr(path) else leaf * 10

    return jax.tree_util.tree_map_with_path(enlarge, (of or model(dtype)).init_params(jax.random.key(7), layer_mode))


def quiet(what: str, done: int, total: int) -> None:
    """A progress that shows nothing."""


def warm_executor(options: EngineConfig = OPTIONS, layer_mode: LayerMode = "loop") -> JaxExecutor:
    """Return an executor that compiles its programs on demand in the quick suite."""
    with programs_on_demand():
        return compiled_executor(options, layer_mode)


def compiled_executor(options: EngineConfig = OPTIONS, layer_mode: LayerMode = "loop") -> JaxExecutor:
    """Return an executor with all programs."""
    executor = JaxExecutor.create(model(), params(layer_mode), options)
    executor.warm_up(quiet)
    return executor
