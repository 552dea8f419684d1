"""The executor that beam searches run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jpaged.device.executor import JaxExecutor
from tests.e2e.sharing_rig import make_executor
from tests.parity.cases import BEAMS_CHECKPOINT


@pytest.fixture(scope="session")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JaxExecutor]:
    """Warmed up once; every search has an engine of its own."""
    executor = make_executor(BEAMS_CHECKPOINT, tmp_path_factory.mktemp("beams"))
    yield executor
    executor.shutdown()
