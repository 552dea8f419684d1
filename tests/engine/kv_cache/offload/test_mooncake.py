"""Mooncake Store as a tier: what a fleet shares, and that no failure of the store is more than a miss."""

from __future__ import annotations

import ctypes
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from jpaged.config import KVTransferOptions
from jpaged.engine.kv_cache.connector import KVConnectorConfig, import_connector
from jpaged.engine.kv_cache.offload import mooncake
from jpaged.engine.kv_cache.offload.mooncake import MooncakeStoreConnector, connect_client, load_options
from jpaged.errors import InvalidArgument
from tests.engine.kv_cache.offload.disks import PROMPT, Server

EXTRA = {"master_server_address": "127.0.0.1:1", "global_segment_size": "1MB", "call_timeout": 0.05}
SIZE = 64
KEY, OTHER = b"k" * 32, b"o" * 32
NOT_FOUND, NO_ROOM, LOST = -704, -200, -900


class Master:
    """The values of a fleet, and what goes wrong with them.

    Attributes:
        is_lost: every call fails, as when the master is killed.
        goes_on: cleared, every call waits for it.
        calls: names of the calls so far.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.is_lost = False
        self.has_room = True
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.calls: list[str] = []
        self.clients: list[Client] = []

    def connect(self, *_: Any) -> Client | None:
        if self.is_lost:
            return None
        self.clients.append(Client(self))
        return self.clients[-1]

    def restart(self) -> None:
        self.values.clear()
        self.is_lost = False

    def corrupt(self, index: int) -> str:
        """Changes a bit of a value; its key."""
        key = [*self.values][index]
        value = bytearray(self.values[key])
        value[3] ^= 1
        self.values[key] = bytes(value)
        return key


class Client:
    """What the connector calls of Mooncake's client."""

    def __init__(self, master: Master) -> None:
        self.master = master
        self.is_closed = False

    def _begin(self, name: str) -> bool:
        self.master.calls.append(name)
        self.master.goes_on.wait(10)
        return not self.master.is_lost

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        return 0

    def is_exist(self, key: str) -> int:
        return int(key in self.master.values) if self._begin("is_exist") else LOST

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        if not self._begin("batch_is_exist"):
            return [LOST] * len(keys)
        return [int(key in self.master.values) for key in keys]

    def batch_get_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        if not self._begin("get_into"):
            return [LOST] * len(keys)
        return [self._get_into(*one) for one in zip(keys, buffer_ptrs, sizes, strict=True)]

    def _get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        if (value := self.master.values.get(key)) is None:
            return NOT_FOUND
        ctypes.memmove(buffer_ptr, value, min(size, len(value)))
        return len(value)

    def batch_put_from(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        if not self._begin("put_from"):
            return [LOST] * len(keys)
        return [self._put_from(*one) for one in zip(keys, buffer_ptrs, sizes, strict=True)]

    def _put_from(self, key: str, buffer_ptr: int, size: int) -> int:
        if not self.master.has_room:
            return NO_ROOM
        self.master.values.setdefault(key, ctypes.string_at(buffer_ptr, size))
        return 0

    def remove(self, key: str, force: bool = False) -> int:
        raise AssertionError("removals are by expression")

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        if not self._begin("remove"):
            return LOST
        found = [key for key in self.master.values if re.match(regex_pattern, key)]
        for key in found:
            del self.master.values[key]
        return len(found)

    def close(self) -> int:
        self.is_closed = True
        return 0


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(mooncake, "_RETRY_S", 0.002)
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)


@pytest.fixture
def master():
    made = Master()
    yield made
    made.goes_on.set()


def server_of(master: Master, tmp_path: Any, sizes: dict[str, int] | None = None, **extra: Any) -> Server:
    def connector(config: KVConnectorConfig) -> MooncakeStoreConnector:
        return MooncakeStoreConnector(replace(config, extra_config={**EXTRA, **extra}), master.connect)

    return Server(tmp_path, connector=connector, sizes=sizes or {})


def connector_of(master: Master, identity: bytes = bytes(32), **extra: Any) -> MooncakeStoreConnector:
    config = KVConnectorConfig(identity, SIZE, {**EXTRA, **extra}, lambda key: None)
    return MooncakeStoreConnector(config, master.connect)


def save(connector: MooncakeStoreConnector, key: bytes = KEY) -> bool:
    return connector.save(key, memoryview(key[:1] * SIZE))


def load(connector: MooncakeStoreConnector, key: bytes = KEY) -> bytes | None:
    into = bytearray(SIZE)
    return bytes(into) if connector.load(key, memoryview(into)) else None


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def wait_until_up(connector: MooncakeStoreConnector) -> None:
    wait_until(lambda: connector._calls._is_up)


# --- with engines ---------------------------------------------------------------------------------------------------


def test_servers_of_a_fleet_find_what_the_others_computed(tmp_path, master):
    first, second = server_of(master, tmp_path), server_of(master, tmp_path)
    assert first.ask("a", PROMPT) == 0
    assert second.ask("a", PROMPT) == 24
    assert (second.load().num_external_hit_tokens, second.load().num_external_fallbacks) == (24, 0)
    longer = [*PROMPT, *range(3, 15)]
    assert second.ask("b", longer) == 28
    assert first.ask("c", [*longer, 1]) == 40  # 28 in memory
    assert first.load().num_external_hit_tokens == 12
    for server in (first, second):
        server.stop()
    assert all(client.is_closed for client in master.clients)


def test_a_prompt_is_looked_up_in_one_call(tmp_path, master):
    server_of(master, tmp_path).ask("a", PROMPT)
    second = server_of(master, tmp_path)
    master.calls.clear()
    assert second.ask("a", [*PROMPT, 1]) == 28
    assert master.calls.index("get_into") == 1  # after one lookup
    second.kill()


@pytest.mark.parametrize("other", [{"cache_salt": "t"}, {"cache_tenant": "u"}, {}])
def test_tenants_and_salts_find_only_their_own_blocks(tmp_path, master, other):
    own = {"cache_salt": "s", "cache_tenant": "t"}
    server_of(master, tmp_path).ask("a", PROMPT, **own)
    second = server_of(master, tmp_path)
    assert second.ask("a", PROMPT, **(own | other if other else {})) == 0
    assert second.ask("b", PROMPT, **own) == 24
    second.kill()


def test_wrong_bytes_are_a_miss_and_are_replaced(tmp_path, master):
    server_of(master, tmp_path).ask("a", PROMPT)
    right = dict(master.values)
    key = master.corrupt(3)
    second = server_of(master, tmp_path)
    assert second.ask("a", PROMPT) == 12
    assert (second.load().num_external_blocks_dropped, second.load().external_is_on) == (1, 1)
    assert second.ask("b", [*PROMPT, 1]) == 28
    second.run()
    assert master.values[key] == right[key]
    second.kill()


@pytest.mark.parametrize("when", ["lookup", "load", "save"])
def test_a_master_that_is_killed_costs_hits_and_nothing_else(tmp_path, master, when, monkeypatch):
    server_of(master, tmp_path).ask("a", PROMPT)
    second = server_of(master, tmp_path)
    if when == "lookup":
        master.is_lost = True
        assert second.ask("a", PROMPT) == 0
    else:
        name = {"load": "batch_get_into", "save": "batch_put_from"}[when]
        whole = getattr(Client, name)

        def dies(self: Client, *arguments: Any) -> Any:
            self.master.is_lost = True
            return whole(self, *arguments)

        monkeypatch.setattr(Client, name, dies)
        assert second.ask("a", PROMPT) == (0 if when == "load" else 24)
        assert second.ask("b", [9, *PROMPT]) == 0
        assert master.is_lost
        monkeypatch.setattr(Client, name, whole)
    assert (second.load().external_is_on, second.load().num_external_failures) == (1, 0)
    master.restart()
    wait_until_up(second.store._connector)
    assert second.ask("c", [8, *PROMPT]) == 0
    third = server_of(master, tmp_path)
    assert third.ask("a", [8, *PROMPT]) == 28
    second.stop()
    third.stop()


def test_a_value_that_the_master_evicted_is_computed(tmp_path, master, monkeypatch):
    server_of(master, tmp_path).ask("a", PROMPT)
    second = server_of(master, tmp_path)
    get_into = Client._get_into

    def evicts(self: Client, key: str, *arguments: Any) -> int:
        if key == [*self.master.values][2]:
            return NOT_FOUND
        return get_into(self, key, *arguments)

    monkeypatch.setattr(Client, "_get_into", evicts)
    assert second.ask("a", PROMPT) == 8
    assert (second.load().num_external_fallbacks, second.load().external_is_on) == (1, 1)
    second.kill()


# --- the connector alone ----------------------------------------------------------------------------------------------


def test_other_weights_models_and_prefixes_have_other_keys(master):
    mine = connector_of(master)
    assert save(mine) and load(mine) == b"k" * SIZE
    others = [connector_of(master, b"\1" * 32), connector_of(master, cache_prefix="blue/")]
    for other in others:
        assert not other.lookup(KEY) and load(other) is None
        assert save(other)
    assert len(master.values) == 3
    others[0].reset()  # ends only its own
    assert len(master.values) == 2 and mine.lookup(KEY)


def test_values_are_found_removed_and_reset(master):
    connector = connector_of(master)
    assert save(connector) and save(connector, OTHER) and connector.num_blocks == 2
    assert connector.lookup_all([KEY, b"x" * 32, OTHER]) == [True, False, True]
    connector.remove(KEY)
    assert not connector.lookup(KEY) and load(connector) is None and load(connector, OTHER) == b"o" * SIZE
    connector.reset()
    assert not master.values and connector.num_blocks == 0
    connector.close()
    assert master.clients[0].is_closed


def test_the_blocks_of_a_prompt_are_loaded_and_saved_by_one_call_each(tmp_path, master):
    room = {"num_host_blocks": 128}
    server_of(master, tmp_path, room).ask("a", PROMPT, max_tokens=1)
    assert (master.calls.count("put_from"), len(master.values)) == (1, 7)
    second = server_of(master, tmp_path, room)
    master.calls.clear()
    assert second.ask("a", PROMPT) == 24
    assert master.calls.count("get_into") == 1
    second.kill()


def test_more_values_than_buffers_take_several_calls(master, monkeypatch):
    monkeypatch.setattr(mooncake, "_MAX_BUFFERS", 16)
    connector = connector_of(master)
    keys = [bytes([number]) * 32 for number in range(40)]
    values = [memoryview(key * (SIZE // 32)) for key in keys]
    into = [bytearray(SIZE) for _ in keys]
    assert connector.save_all(keys, values) == [True] * 40 and connector.num_blocks == 40
    del master.values[[*master.values][20]]
    assert connector.load_all(keys, [memoryview(one) for one in into]) == [number != 20 for number in range(40)]
    assert [bytes(one) == bytes(value) for one, value in zip(into, values, strict=True)].count(False) == 1
    assert (master.calls.count("put_from"), master.calls.count("get_into")) == (3, 3)
    assert connector.max_batch == 64


def test_hits_in_memory_renew_leases(master, monkeypatch):
    monkeypatch.setattr(mooncake, "_KEYS_PER_TOUCH", 2)
    connector = connector_of(master)
    master.calls.clear()
    connector.touch([bytes([n]) * 32 for n in range(5)])
    assert master.calls == ["batch_is_exist"] * 3


def test_a_store_without_room_is_not_lost(master):
    connector = connector_of(master)
    master.has_room = False
    assert not save(connector) and connector._calls._is_up and not connector.lookup(KEY)
    master.has_room = True
    assert save(connector)


def test_a_value_of_another_size_is_a_miss(master):
    connector = connector_of(master)
    save(connector)
    (key,) = master.values
    for size in (SIZE - 1, SIZE + 1):
        master.values[key] = bytes(size)
        assert load(connector) is None and connector._calls._is_up


def test_while_a_call_hangs_others_return_at_once(master):
    connector = connector_of(master)
    save(connector)
    master.goes_on.clear()
    hanging = threading.Thread(target=load, args=(connector,), daemon=True)
    hanging.start()
    wait_until(lambda: "get_into" in master.calls)
    time.sleep(EXTRA["call_timeout"])  # type: ignore[arg-type]
    num_calls = master.calls.count("batch_is_exist")
    assert not connector.lookup(KEY) and load(connector) is None and not save(connector, OTHER)
    assert master.calls.count("batch_is_exist") == num_calls and hanging.is_alive()
    master.goes_on.set()
    hanging.join()
    wait_until_up(connector)
    assert load(connector) == b"k" * SIZE


def test_a_client_that_hangs_is_not_closed(master):
    connector = connector_of(master)
    master.goes_on.clear()
    hanging = threading.Thread(target=connector.lookup, args=(KEY,), daemon=True)
    hanging.start()
    wait_until(lambda: "batch_is_exist" in master.calls)
    connector.close()
    assert not master.clients[0].is_closed and not connector.lookup(KEY)


def test_without_a_free_buffer_a_transfer_is_a_miss(master):
    connector = connector_of(master)
    save(connector)
    taken = [connector._calls._free.get() for _ in range(mooncake._MAX_BUFFERS)]
    assert load(connector) is None and not save(connector, OTHER) and connector.lookup(KEY)
    for number in taken:
        connector._calls._free.put(number)
    assert load(connector) == b"k" * SIZE


def test_what_is_removed_while_the_master_hangs_is_not_found_afterwards(master, monkeypatch):
    monkeypatch.setattr(mooncake, "_RETRY_S", 10.0)
    connector = connector_of(master)
    save(connector)
    save(connector, OTHER)
    master.is_lost = True
    connector.remove(KEY)  # finds out
    connector.remove(OTHER)
    master.is_lost = False  # with its values: it did not answer for a time
    assert len(master.values) == 2 and not connector.lookup(KEY)
    assert connector._calls._recover(is_start=False)
    assert not connector.lookup(KEY) and not master.values


def test_a_server_starts_without_a_master_and_connects_later(master, caplog):
    master.is_lost = True
    connector = connector_of(master)
    assert not connector.lookup(KEY) and not save(connector)
    assert caplog.text.count("master 127.0.0.1:1: no answer: requests continue without its blocks") == 1
    master.is_lost = False
    wait_until_up(connector)
    assert save(connector) and connector.lookup(KEY)


def test_an_error_of_the_client_is_a_miss(master, monkeypatch):
    connector = connector_of(master)
    whole = Client.batch_is_exist
    monkeypatch.setattr(Client, "batch_is_exist", lambda *_: 1 / 0)
    assert not connector.lookup(KEY)
    monkeypatch.setattr(Client, "batch_is_exist", whole)
    wait_until_up(connector)
    assert save(connector) and connector.lookup(KEY)


# --- options ----------------------------------------------------------------------------------------------------------


def transfer_options(**extra: Any) -> KVTransferOptions:
    given = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return KVTransferOptions.parse(json.dumps(given))


def test_options_are_those_of_vllm_and_mooncake(tmp_path, monkeypatch):
    file = {
        "mode": "embedded",
        "metadata_server": "http://10.0.0.9:8080/metadata",
        "master_server_address": "10.0.0.9:50051",
        "global_segment_size": "80GB",
        "local_buffer_size": 1073741824,
        "protocol": "rdma",
        "device_name": "mlx5_0",
        "a_newer_key": 1,
    }
    (tmp_path / "mooncake.json").write_text(json.dumps(file))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(tmp_path / "mooncake.json"))
    options = load_options({"load_async": True, "protocol": "tcp", "call_timeout": 2, "global_segment_size": "1.5 gb"})
    assert (options.master_server_address, options.metadata_server) == ("10.0.0.9:50051", file["metadata_server"])
    assert (options.protocol, options.device_name, options.call_timeout) == ("tcp", "mlx5_0", 2.0)
    assert (options.segment_bytes, options.local_buffer_size) == (3 << 29, 1 << 30)
    assert load_options({"mode": "standalone-store", "global_segment_size": 0}).segment_bytes == 0
    (tmp_path / "mooncake.json").write_text("[")
    with pytest.raises(InvalidArgument, match=r"MOONCAKE_CONFIG_PATH: .*mooncake\.json cannot be read"):
        load_options({})


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"master": "a:1"}, r"extra_config\.master: is unknown: must be one of master_server_address, metadata_server"),
        ({"master_server_address": "a"}, r"extra_config\.master_server_address: 'a' is not HOST:PORT"),
        ({"global_segment_size": "much"}, r"extra_config\.global_segment_size: 'much' is not a size, such as 4GB"),
        ({"global_segment_size": -1}, r"extra_config\.global_segment_size: -1 is below the limit of 0"),
        ({"mode": "both"}, r"extra_config\.mode: 'both' is not one of embedded, standalone-store"),
        ({"mode": "standalone-store", "global_segment_size": 5}, "must be 0 in mode standalone-store"),
        ({"call_timeout": 31}, r"extra_config\.call_timeout: 31\.0 is above the limit of 30"),
        ({"store_tp_size": 2}, r"extra_config\.store_tp_size: is unknown"),
    ],
)
def test_options_that_are_wrong_are_refused_by_name(extra, problem):
    with pytest.raises(InvalidArgument, match=problem):
        transfer_options(**extra)


def test_the_class_is_found_and_needs_a_master_and_a_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(InvalidArgument, match="master_server_address: is missing: it is the HOST:PORT of mooncake_mas"):
        import_connector(transfer_options())
    with pytest.raises(InvalidArgument, match=r"requires Mooncake .*pip install mooncake-transfer-engine"):
        import_connector(transfer_options(**EXTRA))


def test_a_master_that_is_not_there_is_no_error():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        options = load_options({**EXTRA, "master_server_address": f"127.0.0.1:{unused.getsockname()[1]}"})
        assert connect_client(options, True) is None
