"""What the end-to-end tests share: programs, compiled once for the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jpaged import LLM, LoRARequest
from jpaged.config import EngineConfig
from jpaged.device.executor import JaxExecutor
from jpaged.local_model import LocalModel
from jpaged.testing.fake_executor import FakeExecutor, with_adapters
from tests.e2e.sharing_rig import CHECKPOINT, make_executor
from tests.server.harness import make_serving


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


@pytest.fixture
def open_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Opens an LLM, AsyncLLM or LLMEngine over a fake executor."""
    opened: list[LocalModel] = []

    def build(options: EngineConfig, *_: Any, **__: Any) -> Any:
        kind = with_adapters(2) if options.lora.enable_lora else FakeExecutor
        return make_serving(kind(max_num_seqs=8, num_blocks=256, max_model_len=32), options)

    def open_one(kind: type[LocalModel] = LLM, **options: Any) -> Any:
        monkeypatch.setattr("jpaged.local_model.build", build)
        opened.append(kind(**{"max_num_queued_reqs": 4, **options}))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@pytest.fixture
def adapters(tmp_path: Path) -> Callable[[str, int], LoRARequest]:
    """Writes an adapter of the fake model and returns its request."""

    def write(name: str, weight: int) -> LoRARequest:
        path = tmp_path / f"{name}-{weight}"
        path.write_text(str(weight))
        return LoRARequest(name, weight, str(path))

    return write
