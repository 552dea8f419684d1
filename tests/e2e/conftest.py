"""What the end-to-end tests share: programs, compiled once for the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jpaged.device.executor import JaxExecutor
from tests.e2e.sharing_rig import CHECKPOINT, make_executor


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every engine of this session keeps its compiled programs."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", autouse=True)
def _shared_programs(cache_folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JPAGED_CACHE_DIR", str(cache_folder))
        yield


@pytest.fixture(scope="session")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JaxExecutor]:
    """The executor of the tests of sharing: every engine sees as much of its pools as it is told."""
    executor = make_executor(CHECKPOINT, tmp_path_factory.mktemp("sharing"))
    yield executor
    executor.shutdown()
