"""Keys and values that are kept in other types than they are computed in."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.device.compilation.lowering import sized_step
from jpaged.device.kv_scales import MARGINS, kv_dtype, measure_scales, merge_scales, name_of_kv_dtype, place_scales
from jpaged.device.mesh import build_mesh
from jpaged.kernels.kv_layout import MAX_NUMBER
from jpaged.models.stack import LayerMode
from tests.device import tiny_model
from tests.device.driver import Driver, Row
from tests.device.test_executor import dense_logprobs, prompt

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "int8": 0.1, "fp8": 0.5}


def with_kv(name: str) -> EngineConfig:
    cache = dataclasses.replace(tiny_model.OPTIONS.cache, kv_cache_dtype=name)
    return dataclasses.replace(tiny_model.OPTIONS, cache=cache)


@pytest.mark.long
@pytest.mark.parametrize("name", TOLERANCE)
def test_logits_follow_the_dense_ones_as_closely_as_the_type_can(name: str) -> None:
    executor = tiny_model.warm_executor(with_kv(name))
    assert name_of_kv_dtype(executor.step.layout.dtype) == name
    driver = Driver(executor)
    sequence = driver.sequence(prompt(30))
    errors = []
    driver.run([Row(sequence, 16)])
    for num_tokens in (14, *(1,) * 16):
        outputs = driver.run([Row(sequence, num_tokens)])
        token = int(outputs.token_ids_rn[0, 0])
        errors.append(abs(outputs.logprob(0) - dense_logprobs(sequence)[sequence.num_computed - 1][token]))
        sequence.tokens.append(token)
    executor.shutdown()
    assert np.mean(errors) < TOLERANCE[name]
    if name in ("int8", "fp8"):
        assert np.mean(errors) > 1e-6  # the numbers were kept in 8 bits indeed


@pytest.mark.parametrize(("name", "times"), [("bfloat16", 2), ("int8", 4), ("fp8", 4)])
def test_smaller_types_make_cheaper_blocks(name: str, times: int) -> None:
    def bytes_per_block(kv: str) -> int:
        return sized_step(tiny_model.model(), with_kv(kv), "loop", 5, build_mesh(jax.devices()[:1]))[1].bytes_per_block

    assert bytes_per_block("float32") == bytes_per_block("auto") == times * bytes_per_block(name)


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("layer_mode", ["loop", "scan"])
def test_scales_let_the_probe_fill_the_range(name: str, layer_mode: LayerMode) -> None:
    step, _ = sized_step(tiny_model.model(), with_kv(name), layer_mode, 5, build_mesh(jax.devices()[:1]))
    params = tiny_model.params(layer_mode)
    scales = np.asarray(measure_scales(step, params))
    layout = step.layout
    assert scales.shape == (layout.num_layers, layout.num_kv_heads, 2)
    assert len(np.unique(scales)) == scales.size
    largest = scales * MAX_NUMBER[layout.dtype.name] / MARGINS[layout.dtype.name]
    assert (largest > 0.01).all()
    assert (largest < 1000).all()


@pytest.mark.long
def test_scales_of_a_checkpoint_take_the_place_of_measured_ones() -> None:
    step, _ = sized_step(tiny_model.model(), with_kv("fp8"), "loop", 5, build_mesh(jax.devices()[:1]))
    params, given = tiny_model.params(), np.array([[0.5, 0.25], [np.nan, np.nan], [2, 4]], np.float32)
    scales, measured = np.asarray(place_scales(step, given, params)), np.asarray(measure_scales(step, params))
    for layer in (0, 2):
        assert (scales[layer] == given[layer]).all()
    np.testing.assert_array_equal(scales[1], measured[1])


def test_new_scales_of_some_layers_leave_those_of_others() -> None:
    old, new = np.array([[0.5, 0.25], [3, 5]]), np.array([[np.nan, np.nan], [2, 4]])
    merged = merge_scales(old, new)
    assert merged is not None
    assert merged.tolist() == [[0.5, 0.25], [2, 4]]
    assert merge_scales(old, None) is old
    assert merge_scales(None, new) is new
    assert merge_scales(None, None) is None


def test_names_of_types_go_both_ways() -> None:
    for name in ("float32", "bfloat16", "int8", "fp8"):
        assert name_of_kv_dtype(kv_dtype(name, np.dtype("float32"))) == name
    assert kv_dtype("auto", jnp.dtype("bfloat16")) == jnp.dtype("bfloat16")
