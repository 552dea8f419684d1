"""Which topologies there are, what is known of them, and what is said where none can be compiled for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jpaged.device.aot.topology import TOPOLOGIES, compile_only_devices, compiler_environment, find_topology
from jpaged.errors import InvalidArgument, Unsupported


def test_a_name_says_chips_and_devices() -> None:
    topology = find_topology("tpu7x:2x2x2")
    assert (topology.num_chips, topology.num_devices) == (8, 16)
    assert topology.generation.device_kind == "TPU7x"
    assert find_topology("v6e:2x4").num_devices == 8


def test_a_small_slice_is_one_host_and_a_large_one_several() -> None:
    assert find_topology("v5e:1x1").host_shape == (1, 1, 1)
    assert find_topology("v6e:2x4").host_shape == (2, 4, 1)
    assert find_topology("v5p:2x2x2").host_shape == (2, 2, 1)


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InvalidArgument, match=r"^topology: 'v6e:3x3' is not known; known are .*v6e:2x4.*tpu7x:2x2x1"):
        find_topology("v6e:3x3")


def test_without_libtpu_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(Unsupported, match=r"topology v5e:1x1: .*TPU_LIBRARY_PATH.*make aot"):
        compile_only_devices(find_topology("v5e:1x1"))


def test_a_process_that_compiles_is_a_cpus() -> None:
    environment = compiler_environment(Path("some") / "libtpu.so")
    assert environment["TPU_LIBRARY_PATH"] == str(Path("some") / "libtpu.so")
    assert environment["JAX_PLATFORMS"] == "cpu"


def test_names_are_unique() -> None:
    assert all(TOPOLOGIES[name].name == name for name in TOPOLOGIES)
