"""The share of a GPU that JAX's allocator takes: set before JAX starts, left to the environment, explained if other."""

from __future__ import annotations

from typing import Any

import pytest
from jaxlib import xla_client

from jpaged import build
from jpaged.config import EngineConfig
from jpaged.device import device_info
from jpaged.device.device_info import memory_outside_allocator, prepare_gpu_memory
from jpaged.errors import InvalidArgument

CURRENT, DEPRECATED = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX may start CUDA and has not started; the environment sets no share."""
    monkeypatch.setattr(device_info, "may_have_gpus", lambda: True)
    monkeypatch.setattr("jpaged.device.device_info.xla_bridge.backends_are_initialized", lambda: False)
    monkeypatch.setenv(CURRENT, "")
    monkeypatch.setenv(DEPRECATED, "")


def read_share() -> Any:
    """The share that JAX passes to CUDA's client when it starts."""
    return xla_client.generate_pjrt_gpu_plugin_options().get("memory_fraction")


def test_jax_takes_most_of_a_gpu_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (read_share(), memory_outside_allocator(3 << 30)) == (None, 1 << 30)
    assert prepare_gpu_memory() is None
    assert read_share() == 0.95
    assert memory_outside_allocator(19 << 30) == pytest.approx(1 << 30, abs=1)
    monkeypatch.setattr("jpaged.device.device_info.xla_bridge.backends_are_initialized", lambda: True)
    assert prepare_gpu_memory() is None  # the next model of this process


def test_a_share_of_the_environment_stays_and_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CURRENT, "0.45")
    said = "JAX's allocator takes 0.45 of each GPU (XLA_CLIENT_MEM_FRACTION; unset it for 0.95)"
    assert (prepare_gpu_memory(), read_share()) == (said, 0.45)
    monkeypatch.setenv(CURRENT, "0.95")
    assert prepare_gpu_memory() is None


def test_the_deprecated_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEPRECATED, "0.9")
    said = prepare_gpu_memory()
    assert said == (
        "JAX's allocator takes 0.9 of each GPU (XLA_PYTHON_CLIENT_MEM_FRACTION, which is deprecated: set "
        "XLA_CLIENT_MEM_FRACTION instead, or neither for 0.95)"
    )
    assert read_share() == 0.9
    monkeypatch.setenv(CURRENT, "0.95")
    message = r"^XLA_PYTHON_CLIENT_MEM_FRACTION: 0.9 is set next to XLA_CLIENT_MEM_FRACTION=0.95, which JAX rejects"
    with pytest.raises(InvalidArgument, match=message):
        prepare_gpu_memory()
    with pytest.raises(ValueError, match="specified together"):
        read_share()


@pytest.mark.parametrize("text", ["most", "0", "-0.5", "1.5", "nan"])
def test_what_is_no_share_is_rejected(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CURRENT, text)
    with pytest.raises(InvalidArgument, match=r"^XLA_CLIENT_MEM_FRACTION: .* above 0, and at most 1"):
        prepare_gpu_memory()


def test_a_process_that_used_jax_before_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jpaged.device.device_info.xla_bridge.backends_are_initialized", lambda: True)
    said = prepare_gpu_memory()
    assert said is not None
    assert said.startswith("JAX's allocator takes 0.75 of each GPU, not 0.95, because this process used JAX before:")
    assert said.endswith("set XLA_CLIENT_MEM_FRACTION=0.95 in the environment")
    assert read_share() is None


def test_nothing_is_set_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_info, "may_have_gpus", lambda: False)
    monkeypatch.setenv(CURRENT, "most")  # not read either
    assert prepare_gpu_memory() is None


@pytest.mark.parametrize(
    ("platforms", "is_installed", "may"),
    [("cpu", True, False), ("", True, True), ("cuda,cpu", True, True), ("gpu", True, True), ("", False, False)],
)
def test_cuda_may_start_if_it_is_installed_and_allowed(
    platforms: str, is_installed: bool, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("jpaged.device.device_info.jax.config", type("Config", (), {"jax_platforms": platforms}))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if is_installed else None)
    assert device_info.may_have_gpus() is may


def test_a_model_sets_the_share_before_jax_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Exception):
        """JAX starts its platforms."""

    def start(*sizes: int) -> None:
        assert read_share() == 0.95
        raise Started

    monkeypatch.setattr(build, "serving_meshes", start)
    with pytest.raises(Started):
        build.preview(EngineConfig.load({"model": "demo"}))
