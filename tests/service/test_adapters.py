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
