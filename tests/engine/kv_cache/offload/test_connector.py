"""A third party's connector: found by the next engine, verified, and no request fails or waits because of it."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

import pytest

from jpaged.config import KVTransferOptions
from jpaged.engine.kv_cache import connector as connector_module
from jpaged.engine.kv_cache.connector import CHECKSUM_BYTES, ConnectorGuard, import_connector
from jpaged.engine.kv_cache.offload import connector_tier
from jpaged.errors import InvalidArgument
from jpaged.testing import FakeExecutor
from tests.engine.kv_cache.offload.dict_connector import DictConnector, Hanging
from tests.engine.kv_cache.offload.disks import PROMPT, Inline, Server
from tests.engine.kv_cache.offload.test_told import Reader

OPTIONS = KVTransferOptions("DictConnector", "tests.engine.kv_cache.offload.dict_connector", {"name": "guard"})
SIZE = 64
KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture(autouse=True)
def fresh_stores(monkeypatch):
    monkeypatch.setattr(DictConnector, "stores", {})
    monkeypatch.setattr(Hanging, "goes_on", threading.Event())
    yield
    Hanging.goes_on.set()


class Blocks:
    """Host memory of an executor of some identity."""

    def __init__(self, identity: bytes = bytes(32)) -> None:
        self.bytes_per_block = SIZE
        self._identity = identity

    def kv_identity(self) -> bytes:
        return self._identity


def guard_of(kind: Any = DictConnector, identity: bytes = bytes(32)) -> Any:
    return ConnectorGuard(kind, OPTIONS, Blocks(identity))  # type: ignore[arg-type]


def save(guard: Any, key: bytes = KEY, fill: int = 7) -> bool:
    return bool(guard.save(key, memoryview(bytes([fill]) * SIZE)))


def load(guard: Any, key: bytes = KEY) -> bytes | None:
    into = bytearray(SIZE)
    return bytes(into) if guard.load(key, memoryview(into)) else None


def settle(guard: Any) -> None:
    """Returns when all removals have run."""
    guard._threads.submit(lambda: None).result(10)


# --- with an engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["stop", "kill"])
def test_an_engine_finds_what_an_earlier_one_saved(tmp_path, ends):
    first = Server(tmp_path, connector=DictConnector)
    assert first.ask("a", PROMPT) == 0
    load = first.load()
    assert (load.num_external_blocks, load.num_external_blocks_written, load.external_is_on) == (7, 7, 1)
    getattr(first, ends)()
    second = Server(tmp_path, connector=DictConnector)
    assert second.ask("a", PROMPT) == 24
    load = second.load()
    assert (load.num_external_hit_tokens, load.num_external_fallbacks, load.num_external_blocks_read) == (24, 0, 6)
    assert (load.num_disk_hit_tokens, load.disk_is_on) == (0, 0)
    second.stop()
    assert second.store._connector.is_closed


def test_values_of_other_tenants_are_not_found(tmp_path):
    first = Server(tmp_path, connector=DictConnector)
    first.ask("a", PROMPT, cache_tenant="t", cache_salt="s")
    first.kill()
    second = Server(tmp_path, connector=DictConnector)
    assert second.ask("a", PROMPT, cache_tenant="u", cache_salt="s") == 0
    assert second.ask("b", PROMPT, cache_tenant="t", cache_salt="s") == 24
    second.kill()


def second_life(path, kind):
    first = Server(path, connector=DictConnector)
    first.ask("a", PROMPT)
    first.kill()
    return Server(path, connector=kind)


def test_wrong_bytes_are_a_miss(tmp_path):
    server = second_life(tmp_path, DictConnector)
    values = server.store._connector.values
    third = [*values][3]
    values[third] = values[[*values][2]]
    assert server.ask("a", PROMPT) == 12
    load = server.load()
    assert (load.num_external_blocks_dropped, load.num_external_fallbacks) == (1, 1)
    assert values[third] != values[[*values][2]]  # computed and saved again
    server.kill()


@pytest.mark.parametrize("method", ["lookup", "load", "save", "touch", "num_blocks"])
def test_an_error_turns_the_connector_off_and_requests_continue(tmp_path, method, caplog):
    def fails(*_: Any) -> Any:
        raise ConnectionError("the store is gone")

    kind: Any = type("Failing", (DictConnector,), {})
    server = second_life(tmp_path, kind)
    setattr(kind, method, property(fails) if method == "num_blocks" else fails)
    assert server.ask("a", [*PROMPT, 1]) in (0, 28)
    server.ask("b", [9, *PROMPT])
    server.ask("c", [9, *PROMPT])  # a hit on the device, which is noted in the store
    load = server.load()
    assert (load.external_is_on, load.num_external_blocks) == (0, 0) and load.num_external_failures
    assert f"KV connector Tested is now off: {method} failed" in caplog.text
    assert "the store is gone" in caplog.text
    server.stop()


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3)])
@pytest.mark.parametrize("method", ["lookup", "load", "save", "touch", "remove", "reset", "close"])
def test_errors_that_are_no_exceptions_do_not_end_the_engine(tmp_path, method, error, caplog):
    def fails(*_: Any) -> Any:
        raise error

    kind: Any = type("Failing", (DictConnector,), {})
    server = second_life(tmp_path, kind)
    setattr(kind, method, fails)
    server.ask("a", [*PROMPT, 1])
    server.ask("b", [9, *PROMPT])
    server.ask("c", [9, *PROMPT])
    server.memory.connectors[0].remove(next(iter(server.store._connector.values)))
    server.h.engine.reset_prefix_cache()
    server.run()
    server.ask("d", PROMPT)
    server.stop()
    assert f"{method} failed" in caplog.text or "failed in close" in caplog.text


def test_a_save_that_hangs_in_a_store_that_is_off_does_not_delay_shutdown(tmp_path):
    server = Server(tmp_path, connector=DictConnector)
    server.writers.hold()
    server.submit("a", PROMPT)
    server.step(20)
    (tier,) = server.memory.connectors
    assert not tier.flush()
    server.store._disable("save", TimeoutError())
    assert tier.flush()
    server.writers.release()
    server.run()
    server.stop()


def test_loads_and_saves_that_hang_hold_up_no_request(tmp_path):
    server = second_life(tmp_path, DictConnector)
    server.readers.hold()
    server.writers.hold()
    server.submit("a", PROMPT)
    server.step(2)
    assert server.queues.pending_fetch
    server.submit("b", [9, *PROMPT])
    server.step(20)
    assert server.h.ended("b")
    server.h.clock.advance(1000.0)
    server.step(40)
    assert server.h.ended("a")
    assert server.load().num_external_fallbacks == 1
    server.readers.release()
    server.writers.release()
    server.run()
    server.kill()


def test_removals_that_hang_hold_up_no_request_and_nothing_is_found(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(connector_module, "_CLOSE_S", 0.01)
    server = second_life(tmp_path, Hanging)
    future = server.h.engine.reset_prefix_cache()
    server.step(1)
    assert future.result(0) == 7
    assert server.ask("a", PROMPT) == 0
    server.stop()
    assert "did not close within" in caplog.text


def test_requests_continue_while_lookups_hang(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(connector_module, "_LOOKUP_WAIT_S", 0.0)
    other = [50 - i for i in range(24)]
    first = Server(tmp_path, connector=DictConnector)
    first.ask("a", PROMPT)
    first.ask("b", other)
    first.kill()
    server = Server(tmp_path, connector=DictConnector)
    server.lookups.hold()
    assert server.ask("a", PROMPT) == 0
    assert server.ask("b", [9, *PROMPT]) == 0
    assert len(server.lookups.held or ()) == 1  # no other starts until it ends
    assert caplog.text.count("KV connector Tested: lookups of a prompt take over 0 s: requests continue") == 1
    server.lookups.release()
    assert server.ask("c", other) == 20
    server.kill()


def test_a_save_that_hangs_is_polled_rarely_and_not_at_all_in_a_store_that_is_off(tmp_path):
    server = Server(tmp_path, connector=DictConnector)
    loop = server.h.engine._loop
    server.writers.hold()
    server.submit("a", PROMPT)
    server.step(20)
    assert server.h.ended("a") and loop.awaits_tiers and loop.idle_budget_s == 0.001
    for _ in range(3):
        server.h.clock.advance(1.0)
        loop.step()
    assert loop.awaits_tiers and loop.idle_budget_s == 1.0
    server.submit("b", [9, *PROMPT])
    server.step(20)
    assert server.h.ended("b") and loop.idle_budget_s == 0.001  # more to save
    server.store._disable("save", TimeoutError())
    for _ in range(3):
        server.h.clock.advance(1.0)
        loop.step()
    assert not loop.awaits_tiers and loop.idle_budget_s == 0.0
    server.writers.release()
    server.run()
    server.stop()


def test_blocks_that_were_not_saved_are_counted_at_the_end(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(connector_tier, "_END_S", 0.0)
    server = Server(tmp_path, connector=DictConnector)
    server.writers.hold()
    server.submit("a", PROMPT)
    server.step(20)
    server.stop()
    assert caplog.text.count("KV connector (external): 7 blocks were not written") == 1
    server.writers.release()
    server.kill()


def test_a_reset_that_fails_leaves_nothing_to_find(tmp_path, caplog):
    def fails(_: Any) -> None:
        raise ConnectionError("the store is gone")

    server = Server(tmp_path, connector=type("Failing", (DictConnector,), {"reset": fails}))
    server.ask("a", PROMPT)
    server.h.engine.reset_prefix_cache()
    server.run()
    settle(server.store)
    assert not server.store._connector.values
    assert "KV connector Tested: reset failed; removed 7 keys instead" in caplog.text
    assert "KV connector Tested is now off: reset failed" in caplog.text
    assert server.ask("b", PROMPT) == 0 and not server.load().external_is_on
    server.stop()


def test_kv_events_name_what_the_connector_has(tmp_path):
    server = Server(tmp_path, connector=DictConnector, sizes={"num_blocks": 12, "num_host_blocks": 8})
    reader = Reader(server.memory.prefixes)
    server.ask("a", PROMPT)
    assert len(reader.held["external"]) == 7 and not reader.held["disk"]
    connector = server.store._connector
    connector.evict([*connector.values][6])
    server.step(1)
    assert len(reader.held["external"]) == 6 and server.load().num_external_blocks_evicted == 1
    server.h.engine.reset_prefix_cache()
    server.run()
    assert not reader.held["external"]
    server.kill()


# --- the guard ------------------------------------------------------------------------------------------------------


def test_a_value_ends_with_a_checksum_of_identity_key_and_contents():
    guard = guard_of()
    assert save(guard) and load(guard) == bytes([7]) * SIZE
    assert not save(guard)  # it is there
    values = guard._connector.values
    assert len(values[KEY]) == SIZE + CHECKSUM_BYTES and values[KEY][:SIZE] == bytes([7]) * SIZE
    values[OTHER] = values[KEY]
    assert load(guard, OTHER) is None and not guard.lookup(OTHER)
    other = guard_of(identity=b"x" * 32)
    other._connector.values[KEY] = values[KEY]
    assert load(other) is None and other.counts.num_dropped == 1
    guard.close()
    other.close()


def test_what_is_removed_is_not_found_from_then_on():
    guard = guard_of(Hanging)
    save(guard)
    save(guard, OTHER)
    gone: list[bytes | None] = []
    guard.add_removal_listener(gone.append)
    guard.remove(KEY)
    assert not guard.lookup(KEY) and load(guard) is None and guard.lookup(OTHER)
    assert guard.reset() == 2  # the removal has not run
    assert not guard.lookup(OTHER)
    Hanging.goes_on.set()
    settle(guard)
    assert not guard._connector.values and gone == [KEY, None]
    assert save(guard) and guard.lookup(KEY)
    guard.close()


def test_a_call_that_hangs_turns_the_connector_off(monkeypatch, caplog):
    guard = guard_of(Hanging)
    save(guard)
    guard.remove(KEY)
    assert guard.counts.num_blocks == 1 and guard.is_on
    while not guard._calls:
        time.sleep(0.001)
    monkeypatch.setattr(connector_module, "_CALL_TIMEOUT_S", 0.0)
    assert guard.counts.num_blocks == 0 and not guard.is_on
    assert guard.counts.num_failures == 1
    assert "KV connector DictConnector is now off: remove failed" in caplog.text
    Hanging.goes_on.set()
    guard.close()
    assert not guard._calls


def test_a_lookup_that_hangs_turns_the_connector_off(monkeypatch, caplog):
    monkeypatch.setattr(connector_module, "_LOOKUP_WAIT_S", 0.0)
    guard, goes_on = guard_of(), threading.Event()
    guard._connector.lookup = lambda key: goes_on.wait(5)
    guard.refresh(lambda is_stored: is_stored(KEY))
    while not guard._calls:
        time.sleep(0.001)
    monkeypatch.setattr(connector_module, "_CALL_TIMEOUT_S", 0.0)
    assert guard.counts.num_failures == 1 and not guard.is_on
    assert "KV connector DictConnector is now off: lookup failed" in caplog.text
    goes_on.set()
    guard.close()  # after the lookup
    assert guard._connector.is_closed and not guard._calls and not guard.lookup(KEY)


def test_what_is_looked_up_while_it_is_removed_is_not_found():
    guard = ConnectorGuard(DictConnector, OPTIONS, Blocks(), Inline())  # type: ignore[arg-type]
    save(guard)
    guard._known.clear()

    def lookup(key: bytes) -> bool:
        guard.remove(KEY)
        settle(guard)
        return True

    guard._connector.lookup = lookup  # type: ignore[method-assign]
    guard.refresh(lambda is_stored: is_stored(KEY))
    assert not guard.lookup(KEY)
    guard.close()


def test_the_index_is_limited(monkeypatch):
    monkeypatch.setattr(connector_module, "_MAX_KNOWN", 2)
    guard = guard_of()
    keys = [bytes([number]) * 32 for number in range(3)]
    assert all(save(guard, key) for key in keys)
    assert [guard.lookup(key) for key in keys] == [False, True, True]
    assert load(guard, keys[0]) is not None and guard.lookup(keys[0])
    guard.close()


def test_damaged_blocks_are_logged_once_and_counted(caplog):
    guard = guard_of()
    for key in (KEY, OTHER):
        guard._connector.values[key] = bytes(SIZE + CHECKSUM_BYTES)
        assert load(guard, key) is None
    guard.close()
    assert not guard._connector.values
    assert caplog.text.count("dropped a damaged block") == 1 and guard.counts.num_dropped == 2
    assert "KV connector DictConnector: dropped 2 damaged blocks in all" in caplog.text


@pytest.mark.parametrize("num_blocks", [3, lambda self: 3, property(lambda self: 3)])
def test_the_number_of_blocks_may_be_an_attribute_a_method_or_a_property(num_blocks):
    guard = guard_of(type("Counting", (DictConnector,), {"num_blocks": num_blocks}))
    assert guard.counts.num_blocks == 3
    guard.close()


@pytest.mark.parametrize("num_blocks", ["3", None, lambda self: 3.0, lambda self, other: 3])
def test_a_number_of_blocks_that_is_none_is_refused(num_blocks):
    with pytest.raises(InvalidArgument) as error:
        guard_of(type("Counting", (DictConnector,), {"num_blocks": num_blocks}))
    assert error.value.field == "kv_transfer_config.kv_connector"
    assert "Counting.num_blocks must be an int, as an attribute, property or plain method: " in str(error.value)


def test_what_is_removed_while_it_is_saved_is_not_stored():
    guard = guard_of()
    assert not guard.save(KEY, memoryview(bytes(SIZE)), lambda: False)
    assert not guard._connector.values
    guard.close()


def test_a_value_that_is_gone_is_no_error():
    guard = guard_of()
    gone: list[bytes | None] = []
    guard.add_removal_listener(gone.append)
    save(guard)
    guard._connector.lookup = lambda key: True
    assert load(guard, OTHER) is None and gone == [OTHER]
    assert guard.is_on and not guard.counts.num_dropped
    guard.close()


def test_removals_run_before_the_end():
    guard = guard_of(Hanging)
    save(guard)
    guard.remove(KEY)
    Hanging.goes_on.set()
    guard.close()
    assert not guard._connector.values and guard._connector.is_closed and not guard.is_on


def test_the_last_user_closes_a_connector(caplog):
    guard = guard_of()
    assert guard.share() is guard
    guard.close()
    assert guard.is_on and save(guard)
    guard._connector.close = lambda: 1 / 0
    guard.close()
    assert "KV connector DictConnector failed in close" in caplog.text


# --- the class ------------------------------------------------------------------------------------------------------


def test_a_class_is_imported_by_name():
    assert import_connector(OPTIONS) is DictConnector


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (None, "kv_transfer_config.kv_connector_module_path: given cannot be imported: ModuleNotFoundError"),
        ("1 / 0", "kv_connector_module_path: given cannot be imported: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "kv_connector_module_path: given cannot be imported: SystemExit: 3"),
        ("", "kv_transfer_config.kv_connector: given has no class DictConnector"),
        ("DictConnector = 3", "given has no class DictConnector"),
        (
            "class DictConnector:\n    def load(self): ...\n    def close(self): ...",
            "kv_connector: DictConnector lacks lookup, save, touch, remove, reset: it must implement "
            "jpaged.engine.kv_cache.connector.KVConnector, which differs from vLLM's",
        ),
        (
            "from tests.engine.kv_cache.offload import dict_connector as given\n"
            "class DictConnector(given.DictConnector):\n    async def load(self, key, into): ...",
            "kv_connector: DictConnector.load is async: it must be a plain method",
        ),
        (
            "from tests.engine.kv_cache.offload import dict_connector as given\n"
            "class DictConnector(given.DictConnector):\n    async def num_blocks(self): ...",
            "kv_connector: DictConnector.num_blocks is async: it must be a plain method",
        ),
    ],
)
def test_a_class_that_cannot_serve_is_refused(tmp_path, monkeypatch, source, problem):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "given", raising=False)
    if source is not None:
        (tmp_path / "given.py").write_text(source)
    with pytest.raises(InvalidArgument) as error:
        import_connector(KVTransferOptions("DictConnector", "given"))
    assert problem in str(error.value)
    sys.modules.pop("given", None)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_connector_that_cannot_start_is_refused(is_late):
    class Broken(DictConnector):
        def __init__(self, config):
            if is_late:
                raise InvalidArgument("kv_transfer_config.kv_connector_extra_config", "name is missing")
            raise KeyError("name")

    problem = "extra_config: name is missing" if is_late else "DictConnector cannot start: KeyError: 'name'"
    with pytest.raises(InvalidArgument) as error:
        guard_of(Broken)
    assert problem in str(error.value)


def test_the_identity_of_an_executor_names_its_values():
    blocks = FakeExecutor(num_host_blocks=8).host_blocks
    assert blocks is not None
    guard = ConnectorGuard(DictConnector, OPTIONS, blocks)
    assert guard._connector.config.identity == blocks.kv_identity()  # type: ignore[attr-defined]
    assert guard._connector.config.value_bytes == blocks.bytes_per_block + CHECKSUM_BYTES  # type: ignore[attr-defined]
    guard.close()
