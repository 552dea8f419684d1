"""Adapters by name, without files: what a name means while its adapter is read, and afterwards."""

from __future__ import annotations

import pytest

from jpaged.errors import AlreadyExists, InvalidArgument, NotFound
from jpaged.service.loaded_model import Adapters
from jpaged.testing import FakeAdapter


def test_a_name_is_taken_while_its_adapter_is_read() -> None:
    def read(path: str) -> FakeAdapter:
        with pytest.raises(AlreadyExists, match="adapter 'x' is being loaded; wait"):
            adapters.load("x", "elsewhere")
        with pytest.raises(NotFound, match="name: adapter 'x' is being loaded"):
            adapters.unload("x")
        with pytest.raises(NotFound, match="adapter: adapter 'x' is being loaded"):
            adapters.find("x")
        assert not adapters.loaded()
        return FakeAdapter(3)

    adapters = Adapters(read, 2, "base")
    loaded = adapters.load("x", "here")
    assert adapters.find("x") is loaded
    with pytest.raises(AlreadyExists, match="adapter 'x' is loaded; unload it"):
        adapters.load("x", "here")
    adapters.unload("x")
    with pytest.raises(NotFound, match="name: no adapter 'x' is loaded"):
        adapters.unload("x")


def test_no_adapter_has_the_name_of_the_model() -> None:
    adapters = Adapters(lambda path: FakeAdapter(1), 2, "base", ("further",))
    with pytest.raises(InvalidArgument, match="'base' is the name of the model"):
        adapters.load("base", "somewhere")
    with pytest.raises(InvalidArgument, match="'further' is the name of the model"):
        adapters.load("further", "somewhere")
    assert adapters.names() == frozenset()


def test_host_memory_keeps_the_adapters_used_last() -> None:
    files = {"a": 1, "b": 2, "c": 3}
    adapters = Adapters(lambda path: FakeAdapter(files[path]), 2, "base")
    a, b, c = (adapters.load(name, name) for name in "abc")
    assert (a.matrices, b.matrices, c.matrices) == (None, FakeAdapter(2), FakeAdapter(3))
    assert adapters.loaded() == (a, b, c)
    assert adapters.find("b") is b  # now the one used last
    assert a.fetch().result(60) == FakeAdapter(1)
    assert (a.matrices, b.matrices, c.matrices) == (FakeAdapter(1), FakeAdapter(2), None)
    assert a.fetch().result(0) is a.matrices
    files["c"] = 4
    with pytest.raises(NotFound, match="'c', which left host memory, have changed since it was loaded"):
        c.fetch().result(60)
    assert adapters.num_in_memory() == 2
    assert (c.digest, c.num_bytes) == (FakeAdapter(3).digest, 1)
    assert adapters.load("c", "c", replaces=True) is adapters.find("c") is not c
    assert (a.matrices, b.matrices) == (FakeAdapter(1), None)


def test_an_unloaded_adapter_leaves_host_memory_with_its_last_request() -> None:
    adapters = Adapters(lambda path: FakeAdapter(1), 2, "base")
    of_request = adapters.load("a", "a")
    adapters.unload("a")
    assert adapters.num_in_memory() == 1
    del of_request
    assert adapters.num_in_memory() == 0
    kept = [adapters.load(name, name) for name in "bc"]
    assert all(one.matrices is not None for one in kept)


def test_the_number_of_adapters_is_limited() -> None:
    adapters = Adapters(lambda path: FakeAdapter(1), 1, "base", max_num=2)
    for name in "ab":
        adapters.load(name, name)
    adapters.load("b", "b", replaces=True)
    with pytest.raises(InvalidArgument, match="name: 2 adapters are loaded, the limit is 2"):
        adapters.load("c", "c")
