"""What the end-to-end tests share: one executor, compiled once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jpaged.device.executor import JaxExecutor
from tests.e2e.rig import make_executor
from tests.models.beam_cases import CHECKPOINT


@pytest.fixture(scope="session")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JaxExecutor]:
    executor = make_executor(CHECKPOINT, tmp_path_factory.mktemp("sharing"))
    yield executor
    executor.shutdown()
