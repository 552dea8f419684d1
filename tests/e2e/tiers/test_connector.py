"""The KV connector of docs/tiers.md under a real model: blocks outlive the engine, and no failure reaches a request."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from jpaged.config import KVTransferOptions
from jpaged.engine.kv_cache import connector
from jpaged.engine.kv_cache.connector import ConnectorGuard, import_connector
from jpaged.engine.kv_cache.offload import connector_tier
from jpaged.errors import InvalidArgument
from jpaged.llm import LLM
from jpaged.testing import FakeExecutor
from jpaged.types import SamplingParams
from tests.e2e.rig import engine_of, generate, open_llm, random_prompts, write_model
from tests.engine.kv_cache.offload.dict_connector import DictConnector

ROOT = Path(__file__).resolve().parents[3]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
SIZES = {"max_model_len": 96, "num_blocks": 40, "block_size": 8, "swap_space": 0.01}


class HangingLoads(DictConnector):
    """Loads wait for `goes_on`."""

    goes_on: ClassVar[threading.Event] = threading.Event()

    def load(self, key: bytes, into: memoryview) -> bool:
        self.goes_on.wait(60)
        return super().load(key, into)


class FailingLoads(DictConnector):
    """Loads raise."""

    def load(self, key: bytes, into: memoryview) -> bool:
        raise ConnectionError("the store is gone")


@pytest.fixture(autouse=True)
def lookups_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine waits for lookups however busy the machine is."""
    monkeypatch.setattr(connector, "_LOOKUP_WAIT_S", 60.0)


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The connector of the page as a module, and the configuration that names it."""
    (source,) = re.findall(r"```python\n(\"\"\"folder_connector.py:.*?)```", (ROOT / "docs/tiers.md").read_text(), re.S)
    (tmp_path / "folder_connector.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield {
        "kv_connector": "FolderConnector",
        "kv_connector_module_path": "folder_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": str(tmp_path / "kv")},
    }
    sys.modules.pop("folder_connector", None)


def patience(llm: LLM, seconds_per_token: float) -> None:
    """Has the engine believe that computing takes so long."""
    (tier,) = engine_of(llm)._loop.memory.connectors
    tier._reader.prefill._rates = dataclasses.replace(tier._reader.prefill._rates, forward_s=((1, seconds_per_token),))


@pytest.mark.long
def test_prefixes_outlive_their_engine_in_the_connector_of_the_page(tmp_path: Path, documented: dict[str, Any]) -> None:
    folder = write_model("llama_mha", tmp_path / "model")
    prompts = random_prompts([50, 70])
    with open_llm(folder, kv_transfer_config=documented, **SIZES) as llm:
        first = generate(llm, prompts, GREEDY)
    (values,) = (tmp_path / "kv").iterdir()
    assert len([*values.iterdir()]) == 7 + 9
    with open_llm(folder, kv_transfer_config=documented, **SIZES) as llm:
        patience(llm, 1000.0)
        second = generate(llm, prompts, GREEDY)
        load = llm.load()
        assert (load.num_external_hit_tokens, load.num_prefix_hit_tokens) == (48 + 64, 48 + 64)
        assert (load.num_external_blocks, load.num_external_failures) == (7 + 9, 0)
        llm.reset_prefix_cache()
    assert second == first
    assert not [*values.iterdir()]


def test_the_connector_of_the_page_saves_a_truncated_file_again(tmp_path: Path, documented: dict[str, Any]) -> None:
    options = KVTransferOptions.parse(json.dumps(documented))
    blocks = FakeExecutor(num_host_blocks=8).host_blocks
    assert blocks is not None
    key, contents, into = b"k" * 32, bytes(blocks.bytes_per_block), bytearray(blocks.bytes_per_block)
    guard = ConnectorGuard(import_connector(options), options, blocks)
    assert guard.save(key, memoryview(contents))
    guard.close()
    path = tmp_path / "kv" / blocks.kv_identity().hex() / key.hex()
    path.write_bytes(path.read_bytes()[:9])
    (path.parent / ".nfs0001").touch()  # a file that NFS keeps for a reader
    guard = ConnectorGuard(import_connector(options), options, blocks)
    assert guard.counts.num_blocks == 1
    assert not guard.load(key, memoryview(into)) and not path.exists()
    assert guard.save(key, memoryview(contents)) and guard.load(key, memoryview(into))
    guard.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["HangingLoads", "FailingLoads"])
def test_requests_continue_without_the_connector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(DictConnector, "stores", {})
    monkeypatch.setattr(connector_tier, "_END_S", 0.1)
    folder = write_model("llama_mha", tmp_path / "model")
    prompts = random_prompts([50])
    config: dict[str, Any] = {"kv_connector": "DictConnector", "kv_connector_module_path": DictConnector.__module__}
    config |= {"kv_connector_extra_config": {"name": kind}}
    with open_llm(folder, kv_transfer_config=config, **SIZES) as llm:
        first = generate(llm, prompts, GREEDY)
    config |= {"kv_connector": kind, "kv_connector_module_path": __name__}
    with open_llm(folder, kv_transfer_config=config, **SIZES) as llm:
        patience(llm, 0.01)
        assert generate(llm, prompts, GREEDY) == first
        load = llm.load()
        assert (load.num_external_hit_tokens, load.num_external_fallbacks) == (0, 1)
        assert load.external_is_on == (kind == "HangingLoads")
    HangingLoads.goes_on.set()


def test_a_wrong_module_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    config = {"kv_connector": "A", "kv_connector_module_path": "no.such.module"}
    with pytest.raises(InvalidArgument, match=r"kv_connector_module_path: no.such.module cannot be imported"):
        LLM(str(tmp_path / "no model"), kv_transfer_config=config)
