"""An executor of the tiny model, compiled once for the tests of a file, and a driver of it for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jpaged.device.executor import JaxExecutor
from tests.device import tiny_model
from tests.device.driver import Driver


@pytest.fixture(scope="module")
def executor() -> Iterator[JaxExecutor]:
    executor = tiny_model.warm_executor()
    yield executor
    executor.shutdown()


@pytest.fixture
def driver(executor: JaxExecutor) -> Driver:
    return Driver(executor)
