"""Parameters that lie as a TPU multiplies them: the same numbers, on the whole way from making them to a step.

The layouts are a TPU's; that they are what it needs, `tests/aot` shows. CPUs take them too, so the way is tested here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from jpaged.checkpoints.weights import put, random_params
from jpaged.device import mesh
from jpaged.device.executor import JaxExecutor
from jpaged.device.mesh import build_mesh, param_shardings
from jpaged.models.stack import LayerMode
from tests.device import tiny_model
from tests.device.driver import Driver, Row


class _Tpu:
    platform = "tpu"


@pytest.fixture
def as_on_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are placed as on TPUs; whatever else asks for the device gets the real one."""
    monkeypatch.setattr(mesh, "first_device", lambda mesh: _Tpu())


def greedy(executor: JaxExecutor) -> tuple[np.ndarray, np.ndarray]:
    driver = Driver(executor)
    outputs = driver.run([Row(driver.sequence([5, 17, 42, 8, 9]), 5), Row(driver.sequence([3, 1]), 2)])
    return outputs.token_ids_rn[:2, 0], np.array([outputs.logprob(row) for row in range(2)])


def order_of(format: Format) -> tuple[int, ...]:
    assert isinstance(format.layout, Layout)
    return format.layout.major_to_minor


@pytest.mark.usefixtures("as_on_tpus")
@pytest.mark.parametrize(
    ("layer_mode", "width", "order"),
    [
        ("scan", 48, (0, 2, 3, 1)),
        ("scan", 256, (0, 2, 1, 3)),
        ("loop", 48, (1, 2, 0)),
        ("loop", 256, (1, 0, 2)),
    ],
)
def test_matrices_lie_row_by_row_and_gated_ones_by_what_fills_the_lanes(
    layer_mode: LayerMode, width: int, order: tuple[int, ...]
) -> None:
    model = tiny_model.model()
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, intermediate_size=width))
    shardings = param_shardings(model, layer_mode, build_mesh(jax.devices()[:1]))
    for path, leaf in jax.tree_util.tree_leaves_with_path(shardings):
        place = jax.tree_util.keystr(path)
        assert isinstance(leaf, Format) == place.endswith(("['kernel']", "['embedding']"))
        if isinstance(leaf, Format):
            own = order_of(leaf)
            assert own == (order if "gate_up" in place else tuple(range(len(own))))


def test_elsewhere_no_leaf_has_one() -> None:
    shardings = param_shardings(tiny_model.model(), "scan", build_mesh(jax.devices()[:1]))
    assert not any(isinstance(leaf, Format) for leaf in jax.tree.leaves(shardings))


@pytest.mark.long
def test_random_and_loaded_leaves_lie_so_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    model, one = tiny_model.model(), build_mesh(jax.devices()[:1])
    plain = random_params(model, "scan", seed=3, shardings=param_shardings(model, "scan", one))
    monkeypatch.setattr(mesh, "first_device", lambda mesh: _Tpu())
    shardings = param_shardings(model, "scan", one)
    made = random_params(model, "scan", seed=3, shardings=shardings)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), plain, made)
    numbers = np.asarray(plain["layers"]["0"]["mlp"]["gate_up"]["kernel"])
    sharding = shardings["layers"]["0"]["mlp"]["gate_up"]["kernel"]
    loaded: Any = put(numbers.shape, lambda index: numbers[index], sharding)
    np.testing.assert_array_equal(np.asarray(loaded), numbers)
    kernel: Any = made["layers"]["0"]["mlp"]["gate_up"]["kernel"]
    assert order_of(kernel.format) == order_of(loaded.format) == (0, 2, 3, 1)


@pytest.mark.long
def test_a_step_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny_model.warm_executor(layer_mode="scan")
    token_ids_r, logprobs_r = greedy(plain)
    plain.shutdown()
    monkeypatch.setattr(mesh, "first_device", lambda mesh: _Tpu())
    executor = tiny_model.warm_executor(layer_mode="scan")
    kernel: Any = executor._runner._params["layers"]["0"]["mlp"]["gate_up"]["kernel"]
    assert order_of(kernel.format) == (0, 2, 3, 1)
    found_ids_r, found_logprobs_r = greedy(executor)
    executor.shutdown()
    np.testing.assert_array_equal(found_ids_r, token_ids_r)
    np.testing.assert_allclose(found_logprobs_r, logprobs_r, rtol=1e-5)
