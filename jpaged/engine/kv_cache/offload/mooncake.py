"""KV connector over Mooncake Store: host memory of all servers of a fleet, as one tier below each one's own.

    server 1 ── MooncakeStoreConnector ──┐                 ┌── segment of server 1
    server 2 ── MooncakeStoreConnector ──┤ mooncake_master ├── segment of server 2     values move between servers
    server 3 ── MooncakeStoreConnector ──┘  (only the index)└── segment of server 3

Any server of the fleet finds what the others have computed, if its blocks have the same identity: `KVConnectorConfig`.

**Failures are misses.** No method raises, so the engine never turns this connector off. A call that finds no master
returns that there is no block. A call that hangs occupies its thread until Mooncake's own timeout, while requests
compute (`KVConnector`). After either, all calls return at once, until the master answers again. A master that restarts
has forgotten all values, and the client connects to it by itself.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jpaged import json_text
from jpaged.config import MooncakeOptions, child_environment, mooncake_config_path, set_default_variables
from jpaged.distributed_env import split_address
from jpaged.engine.kv_cache.connector import KVConnectorConfig
from jpaged.errors import InternalError, InvalidArgument

logger = logging.getLogger(__name__)

_MIN_BUFFERS, _MAX_BUFFERS, _BUFFER_BYTES = 16, 1024, 64 << 20
"""Values in transfer at the same time, of all loads and saves: limits of their number, and their memory."""
_BATCH_BYTES, _MAX_BATCH = 8 << 20, 64
"""Maximum of one call. On busy processors a call costs milliseconds, because threads of three processes take turns."""
_RETRY_S = 1.0
"""Time between attempts to reach a master."""
_CONNECT_S = 2.0
_KEYS_PER_TOUCH = 1024
_LOST = range(-999, -899)
"""Error codes of Mooncake for a master that does not answer."""
_TRANSFER_TIMEOUTS = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")
_CONNECT_PROGRAM = """
import json, os, sys
from mooncake.store import MooncakeDistributedStore
os._exit(MooncakeDistributedStore().setup(json.loads(sys.argv[1])) != 0)
"""
_INSTALL = "pip install mooncake-transfer-engine-non-cuda (or mooncake-transfer-engine, for CUDA)"
_LIBRARIES = "libibverbs1, libnuma1 and liburing2"


class MooncakeClient(Protocol):
    """Methods of `mooncake.store.MooncakeDistributedStore` that are used here; negative results are errors."""

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Register memory for transfers."""
        ...

    def is_exist(self, key: str) -> int:
        """Return 1 if a key is stored, else 0."""
        ...

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Return `is_exist` for each key, and renew their leases."""
        ...

    def batch_get_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        """Copy values to registered memory; return their sizes, or errors."""
        ...

    def batch_put_from(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        """Store registered memory as values, except of keys that have one; return 0 or errors."""
        ...

    def remove(self, key: str, force: bool = False) -> int:
        """Remove a key, with force in spite of leases."""
        ...

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Remove all keys that match; return their number."""
        ...

    def close(self) -> int:
        """Disconnect, and take this process's memory out of the store."""
        ...


Connect = Callable[[MooncakeOptions, bool], MooncakeClient | None]
_Transfer = Callable[[MooncakeClient, Sequence[np.ndarray], int], Sequence[int]]
"""Reads or writes the values from an index on with some buffers; returns their codes."""


class MooncakeStoreConnector:
    """Implementation of `jpaged.engine.kv_cache.connector.KVConnector` over Mooncake Store.

    A key of the store consists of `cache_prefix`, the identity and the key of the block. So blocks of other models,
    weights, types, sizes, layouts, tenants, salts and adapters have other keys.

    Args:
        connect: see `connect_client`.
    """

    def __init__(self, config: KVConnectorConfig, connect: Connect | None = None) -> None:
        options = load_options(config.extra_config)
        self._prefix = f"{options.cache_prefix}jpaged/{config.identity.hex()}/"
        self._value_bytes = config.value_bytes
        self._calls = MooncakeCalls(options, config.value_bytes, connect or connect_client)
        self._num_saved = 0

    @staticmethod
    def check_config(extra_config: Mapping[str, Any]) -> None:
        """Check the options and the installation.

        Raises:
            InvalidArgument: an option is invalid, or Mooncake is not installed.
        """
        load_options(extra_config)
        import_store()

    @property
    def num_blocks(self) -> int:
        """Number of values that this server has saved; only the master has those of others, and evicted ones."""
        return self._num_saved

    def lookup(self, key: bytes) -> bool:
        """Return True if the master has the key."""
        return self.lookup_all([key])[0]

    def lookup_all(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return for each key if the master has it, in one call."""
        names, found = [self._name(key) for key in keys], list[int]()

        def query(client: MooncakeClient) -> int:
            found.extend(client.batch_is_exist(names))
            return min(found, default=0)

        if self._calls.run(query) < 0:
            return [False] * len(keys)
        return [one == 1 for one in found]

    @property
    def max_batch(self) -> int:
        """Return the maximum number of blocks of one call."""
        return max(1, min(_MAX_BATCH, _BATCH_BYTES // self._value_bytes))

    def load(self, key: bytes, into: memoryview) -> bool:
        """Copy a value to `into`; return False if there is none."""
        return self.load_all([key], [into])[0]

    def load_all(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> Sequence[bool]:
        """Copy values to `into`; return which there are."""
        names, size = [self._name(key) for key in keys], self._value_bytes

        def read(client: MooncakeClient, buffers: Sequence[np.ndarray], begin: int) -> Sequence[int]:
            some = names[begin : begin + len(buffers)]
            codes = client.batch_get_into(some, [one.ctypes.data for one in buffers], [size] * len(some))
            for buffer, place, code in zip(buffers, into[begin:], codes, strict=False):
                if code == size:
                    place[:] = buffer.data
            return codes

        return [code == size for code in self._calls.transfer(len(keys), read)]

    def save(self, key: bytes, value: memoryview) -> bool:
        """Store a value; return False if there is no room, or no master."""
        return self.save_all([key], [value])[0]

    def save_all(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> Sequence[bool]:
        """Store values; return which are stored."""
        names, size = [self._name(key) for key in keys], self._value_bytes

        def write(client: MooncakeClient, buffers: Sequence[np.ndarray], begin: int) -> Sequence[int]:
            some = names[begin : begin + len(buffers)]
            for buffer, value in zip(buffers, values[begin:], strict=False):
                buffer[:] = value
            return client.batch_put_from(some, [one.ctypes.data for one in buffers], [size] * len(some))

        are_saved = [code == 0 for code in self._calls.transfer(len(keys), write)]
        self._num_saved += sum(are_saved)
        return are_saved

    def touch(self, keys: Iterable[bytes]) -> None:
        """Look up the keys, which renews their leases, the order in which the master evicts."""
        all_keys = [*keys]
        for start in range(0, len(all_keys), _KEYS_PER_TOUCH):
            self.lookup_all(all_keys[start : start + _KEYS_PER_TOUCH])

    def remove(self, key: bytes) -> None:
        """Remove a key, at the latest when the master answers again."""
        self._calls.remove(f"^{re.escape(self._name(key))}$")

    def reset(self) -> None:
        """Remove all keys of this identity, those of other servers included."""
        self._num_saved = 0
        self._calls.remove(f"^{re.escape(self._prefix)}.*")

    def close(self) -> None:
        """Take this server's memory out of the store."""
        self._calls.close()

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()


class MooncakeCalls:
    """Calls of a client, by any thread. If one finds no master or hangs, others fail at once, not after a timeout each.

        up ── a call finds no master, or hangs ──> down: each call fails at once
        up <── removals ── an answer of the master ── down, once a second

    Args:
        value_bytes: size of each buffer.
        connect: see `connect_client`.
    """

    def __init__(self, options: MooncakeOptions, value_bytes: int, connect: Connect) -> None:
        self._options = options
        self._connect = connect
        num_buffers = min(_MAX_BUFFERS, max(_MIN_BUFFERS, _BUFFER_BYTES // value_bytes))
        self._buffers = np.zeros((num_buffers, value_bytes), np.uint8)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(num_buffers):
            self._free.put(number)
        self._lock = threading.Lock()
        self._client: MooncakeClient | None = None
        self._is_up = False
        self._is_watched = False
        self._running: dict[object, float] = {}  # begins of calls, the oldest first
        self._hung: dict[object, float] = {}
        self._unremoved: dict[str, None] = {}  # patterns of keys to remove before the next call
        self._is_closed = threading.Event()
        if not self._recover(is_start=True):
            self._set_down("no answer")

    def run(self, function: Callable[[MooncakeClient], int]) -> int:
        """Return the code of a function of the client; a negative one if there is no master or the client fails."""
        if (client := self._client) is None or not self._is_up or self._is_hung():
            return _LOST[0]
        call = object()
        with self._lock:
            self._running[call] = time.monotonic()
        try:
            code = function(client)
        except Exception as error:
            self._set_down(f"{type(error).__name__}: {error}")
            return _LOST[0]
        finally:
            with self._lock:
                self._running.pop(call, None)
                self._hung.pop(call, None)
        if code in _LOST:
            self._set_down(f"error {code}")
        return code

    def transfer(self, count: int, function: _Transfer) -> Sequence[int]:
        """Return the codes of a function for `count` values, called with all free buffers until all are done.

        The codes of those for which there is no buffer, or no client, are negative.
        """
        codes: list[int] = []
        while len(codes) < count:
            numbers = self._take(count - len(codes))
            if not numbers:
                break
            buffers, begin, some = [self._buffers[number] for number in numbers], len(codes), list[int]()
            try:
                code = self.run(functools.partial(_run_transfer, function, buffers, begin, some))
            finally:
                for number in numbers:
                    self._free.put(number)
            if code in _LOST:
                break
            codes += some
        return codes + [_LOST[0]] * (count - len(codes))

    def _take(self, count: int) -> list[int]:
        """Return the numbers of free buffers, up to `count`."""
        numbers: list[int] = []
        with contextlib.suppress(queue.Empty):
            while len(numbers) < count:
                numbers.append(self._free.get_nowait())
        return numbers

    def remove(self, pattern: str) -> None:
        """Remove the keys that match a regular expression, before any other call if the master does not answer now."""
        with self._lock:
            if not self._is_up:
                self._unremoved[pattern] = None
                return
        if self.run(lambda client: client.remove_by_regex(pattern, True)) in _LOST:
            with self._lock:
                self._unremoved[pattern] = None
            self._set_down("a removal failed")

    def close(self) -> None:
        """Close the client, unless a call hangs in it."""
        self._is_closed.set()
        self._is_up = False
        if self._client is not None and not self._running and not self._hung:
            self._client.close()

    def _is_hung(self) -> bool:
        """Return True if a call hangs; a hanging call counts once, because others may not use the same server."""
        with self._lock:
            call, begin_s = next(iter(self._running.items()), (None, 0.0))
            if call is None or time.monotonic() - begin_s < self._options.call_timeout:
                return False
            self._hung[call] = self._running.pop(call)
        self._set_down(f"no result after {self._options.call_timeout:g} s")
        return True

    def _set_down(self, reason: str) -> None:
        """Let all calls fail until the master answers."""
        with self._lock:
            self._is_up = False
            if self._is_watched or self._is_closed.is_set():
                return
            self._is_watched = True
        problem = "KV connector MooncakeStoreConnector: master %s: %s: requests continue without its blocks"
        logger.warning(problem, self._options.master_server_address, reason)
        threading.Thread(target=self._watch, name="jpaged-mooncake-watch", daemon=True).start()

    def _watch(self) -> None:
        while not self._is_closed.wait(_RETRY_S):
            if self._recover(is_start=False):
                break

    def _recover(self, *, is_start: bool) -> bool:
        """Return True if the master answers, after all pending removals."""
        try:
            if self._client is None:
                if (client := self._connect(self._options, is_start)) is None:
                    return False
                client.register_buffer(self._buffers.ctypes.data, self._buffers.nbytes)
                self._client = client
            while self._client.is_exist("jpaged") >= 0:
                for pattern in [*self._unremoved]:
                    if self._client.remove_by_regex(pattern, True) in _LOST:
                        return False
                    del self._unremoved[pattern]
                with self._lock:
                    if not self._unremoved:
                        self._is_up, self._is_watched = not self._is_closed.is_set(), False
                        break
            else:
                return False
        except Exception:  # from Mooncake's bindings, which document none: it connects again later
            logger.exception("KV connector MooncakeStoreConnector: the client failed")
            return False
        logger.info("KV connector MooncakeStoreConnector: connected to master %s", self._options.master_server_address)
        return True


def _run_transfer(
    function: _Transfer, buffers: Sequence[np.ndarray], begin: int, codes: list[int], client: MooncakeClient
) -> int:
    """Append a code for each buffer; return the lowest one."""
    found = [*function(client, buffers, begin)]
    codes += found
    if len(found) != len(buffers):
        raise InternalError(f"Mooncake returned {len(found)} codes for {len(buffers)} values")
    return min(found)


def load_options(extra_config: Mapping[str, Any]) -> MooncakeOptions:
    """Return the options of `kv_connector_extra_config` and of the file that MOONCAKE_CONFIG_PATH names.

    Raises:
        InvalidArgument: an option is invalid, or none names the master.
    """
    path, file = mooncake_config_path(), None
    if path is not None:
        try:
            file = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise InvalidArgument("MOONCAKE_CONFIG_PATH", f"{path} cannot be read: {error}") from error
        if not isinstance(file, dict):
            raise InvalidArgument("MOONCAKE_CONFIG_PATH", f"{path} has no JSON object")
    options = MooncakeOptions.parse(extra_config, file)
    options.check_master()
    return options


def import_store() -> Any:
    """Import the class of Mooncake's client.

    Raises:
        InvalidArgument: Mooncake is not installed.
    """
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        name, problem = "kv_transfer_config.kv_connector", f"MooncakeStoreConnector requires Mooncake ({error})"
        remedy = f"install it: {_INSTALL}; it loads the system's {_LIBRARIES}"
        raise InvalidArgument(name, f"{problem}; {remedy}") from error
    return MooncakeDistributedStore


def connect_client(options: MooncakeOptions, is_start: bool) -> MooncakeClient | None:
    """Connect to the master; return None if it does not answer.

    Mooncake's setup holds Python's global lock while it waits. So a serving process tries it in another process first.
    """
    host, port = split_address("master_server_address", options.master_server_address)
    try:
        with socket.create_connection((host.strip("[]"), port), timeout=_CONNECT_S) as connection:
            local_address = str(connection.getsockname()[0])
    except OSError:
        return None
    variables = {
        "MC_STORE_CLIENT_SETUP_RETRIES": "3",
        "MC_RPC_CONNECT_TIMEOUT_MS": str(int(_CONNECT_S * 1e3)),
        "MC_RPC_TIMEOUT_MS": str(int(options.call_timeout * 1e3)),
        **dict.fromkeys(_TRANSFER_TIMEOUTS, str(max(1, round(options.call_timeout)))),
    }
    settings: dict[str, Any] = {
        "local_hostname": options.local_hostname or local_address,
        "metadata_server": options.metadata_server,
        "global_segment_size": 0,
        "local_buffer_size": options.local_buffer_size,
        "protocol": options.protocol,
        "rdma_devices": options.device_name,
        "master_server_addr": options.master_server_address,
        "tenant_id": options.tenant_id,
    }
    if not is_start:
        command = [sys.executable, "-c", _CONNECT_PROGRAM, json_text.dumps(settings)]
        try:
            subprocess.run(
                command,
                env=child_environment(variables),
                timeout=6 * options.call_timeout,
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except (OSError, subprocess.SubprocessError):
            return None
    set_default_variables(variables)
    client = import_store()()
    code = client.setup({**settings, "global_segment_size": options.segment_bytes})
    if code:
        logger.error("KV connector MooncakeStoreConnector: Mooncake's setup failed with code %s; see its log", code)
        return None
    found: MooncakeClient = client
    return found
