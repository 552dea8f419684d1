"""The connectors of docs/kv_connectors.md run as printed; LMCache is a fake of the interface that the page names."""

from __future__ import annotations

import json
import re
import sys
import types
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from docs.site.links import ROOT
from jpaged.config import KVTransferOptions
from jpaged.engine.kv_cache.connector import KVConnector, KVConnectorConfig, import_connector

KEY, OTHER = b"k" * 32, b"k" * 33
VALUE = bytes(range(48))


class FakeKey(NamedTuple):
    """Key with the positional fields of LMCache's."""

    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: int
    dtype: str


class FakeMemory:
    """Memory object with a count of references."""

    def __init__(self, size: int) -> None:
        self.data, self.references = bytearray(size), 1

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self.data)

    def ref_count_down(self) -> None:
        self.references -= 1
        assert self.references >= 0


class FakeBackend:
    """Storage backend and allocator with LMCache's method names."""

    def __init__(self) -> None:
        self.stored: dict[FakeKey, FakeMemory] = {}
        self.has_room, self.is_closed = True, False

    def allocate(self, shape: tuple[int], dtype: str, fmt: str) -> FakeMemory | None:
        assert (dtype, fmt) == ("uint8", "format")
        return FakeMemory(shape[0]) if self.has_room else None

    def contains(self, key: FakeKey, pin: bool = False) -> bool:
        return key in self.stored

    def get_blocking(self, key: FakeKey) -> FakeMemory | None:
        if (found := self.stored.get(key)) is not None:
            found.references += 1
        return found

    def batched_submit_put_task(
        self, keys: list[FakeKey], objs: list[FakeMemory], transfer_spec: Any = None
    ) -> list[Future[None]]:
        done: Future[None] = Future()
        for key, block in zip(keys, objs, strict=True):
            block.references += 1
            self.stored[key] = block
        done.set_result(None)
        return [done]

    def remove(self, key: FakeKey, force: bool = True) -> bool:
        return self.stored.pop(key, None) is not None

    def close(self) -> None:
        self.is_closed = True


def build_connector(
    name: str, module: str, folder: Path, patch: pytest.MonkeyPatch, extra: dict[str, Any]
) -> KVConnector:
    """Import a connector of the page by the options that name it."""
    page = (ROOT / "docs/kv_connectors.md").read_text()
    (source,) = re.findall(rf'```python\n("""{module}\.py:.*?)```', page, re.DOTALL)
    (folder / f"{module}.py").write_text(source)
    patch.syspath_prepend(str(folder))
    patch.delitem(sys.modules, module, raising=False)
    given = {"kv_connector": name, "kv_connector_module_path": module, "kv_connector_extra_config": extra}
    create = import_connector(KVTransferOptions.parse(json.dumps(given)))
    patch.delitem(sys.modules, module)
    return create(KVConnectorConfig(b"i" * 32, len(VALUE), extra, lambda key: None))


def check_store(connector: KVConnector) -> None:
    """Check a store's answers for two keys that share a beginning."""
    into = bytearray(len(VALUE))
    assert not connector.lookup(KEY) and not connector.load(KEY, memoryview(into))
    assert connector.save(KEY, memoryview(VALUE)) and connector.lookup(KEY) and not connector.lookup(OTHER)
    assert connector.load(KEY, memoryview(into)) and into == VALUE
    assert connector.save(OTHER, memoryview(VALUE[::-1])) and connector.num_blocks == 2
    connector.touch([KEY])
    connector.remove(KEY)
    assert not connector.lookup(KEY) and connector.lookup(OTHER)
    connector.remove(KEY)
    connector.reset()
    assert not connector.lookup(OTHER) and connector.num_blocks == 0
    connector.close()


def test_the_minimal_example_stores_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_store(build_connector("MemoryConnector", "memory_connector", tmp_path, monkeypatch, {}))


def test_the_lmcache_sketch_maps_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    modules: dict[str, dict[str, Any]] = {
        "torch": {"uint8": "uint8", "Size": tuple},
        "lmcache": {},
        "lmcache.utils": {"CacheEngineKey": FakeKey},
        "fake_factory": {"create": lambda: (backend, backend, "format")},
    }
    for name, names in modules.items():
        module = types.ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    extra = {"backend_factory": "fake_factory:create"}
    connector = build_connector("LMCacheConnector", "lmcache_connector", tmp_path, monkeypatch, extra)
    assert connector.save(KEY, memoryview(VALUE)) and connector.load(KEY, memoryview(bytearray(len(VALUE))))
    ((key, block),) = backend.stored.items()
    assert key.model_name == (b"i" * 32).hex() and block.references == 1  # the backend's
    block.data = bytearray(3)
    assert not connector.load(KEY, memoryview(bytearray(len(VALUE)))) and block.references == 1
    connector.remove(KEY)
    backend.has_room = False
    assert not connector.save(KEY, memoryview(VALUE)) and not connector.lookup(KEY)
    backend.has_room = True
    check_store(connector)
    assert backend.is_closed and not backend.stored
