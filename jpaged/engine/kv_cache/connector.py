"""KV connectors: stores of cached blocks outside the engine's memory, such as local disk or another server's memory.

    prefix cache ── ConnectorTier ──> ConnectorStore   staging, limits per step, KV events: `offload/connector_tier.py`
                                        BlockStore         jpaged's local disk (`jpaged.blockstore`)
                                        ConnectorGuard ──> KVConnector of a third party, one Python file

A third party implements `KVConnector`; `--kv-transfer-config` names its class. The guard adds what the engine needs
around it: hashes, counters, an end at the first error, and an index, so that the engine thread calls no method of the
connector:

    refresh   a thread looks up a prompt's keys and enters them in the index; the engine thread waits up to 50 ms
    lookup    reads the index, which also has what was saved and loaded
    remove    changes the index at once; a thread removes the key from the store
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import operator
import queue
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from jpaged.blockstore.store import BlockStore, StoreCounts
from jpaged.config import CacheOptions, KVTransferOptions
from jpaged.engine.executor import DeviceRates, HostBlocks
from jpaged.errors import InvalidArgument

logger = logging.getLogger(__name__)

StoreTier = Literal["disk", "external"]
"""Name of a store in KV events and metrics: jpaged's disk, or a third party's connector."""
CHECKSUM_BYTES = 32
"""Bytes that a value has in addition to a block's contents: their hash, which the engine writes and verifies."""
_CALL_TIMEOUT_S = 60.0
"""Duration after which a call counts as hung."""
_LOOKUP_WAIT_S = 0.05
"""Longest wait of the engine thread for the lookups of one prompt; a store's index in memory takes a thousandth."""
_MAX_KNOWN = 1 << 18
"""Maximum number of keys in the index of a connector, about 40 MB; the oldest ones are looked up again."""
_RATE_MEMORY = 0.75
"""Weight of all earlier transfers next to a new one, of each that is one older."""
_MIN_PREFILL_TOKENS, _MAX_SLOWNESS = 16, 100.0
_BELIEF = 1.02
"""Factor on the estimated rate for each group that does not wait, so that a slow store is tried again."""
_CLOSE_S = 5.0
"""Timeout for pending removals and `KVConnector.close` at the end."""


@dataclass(frozen=True, slots=True)
class KVConnectorConfig:
    """Argument of a connector's constructor.

    Attributes:
        identity: 32 bytes, a hash of all that a block's contents depend on except its key: weights, dtype, block size,
            layout, device kind, jpaged's code. Store blocks under identity and key if other models use the same store.
        value_bytes: size of every value: the contents of a block and their checksum.
        extra_config: `kv_connector_extra_config`.
        on_removed: callback for a key that the connector removed by itself, such as an evicted one, after `lookup` has
            become False. Any thread may call it; it returns at once. Only KV events and a metric depend on it.
    """

    identity: bytes
    value_bytes: int
    extra_config: Mapping[str, Any]
    on_removed: Callable[[bytes], None]


class KVConnector(Protocol):
    """Store of values by key, for blocks of the prefix cache. The replicas of a server share one object.

    The constructor takes one `KVConnectorConfig`. It runs once, after the model is loaded, and may block.

    **Keys** are 32 or 33 bytes: a SHA-256 chain over tenant, cache salt, adapter and all tokens up to the block's end,
    and the KV group if it is not the first. Equal keys with the same identity have interchangeable values, so a value
    never changes. Requests that may not share a prefix have different keys.

    **Values** are opaque, and all have `value_bytes` bytes. They end with a checksum of identity, key and contents. The
    engine verifies it on each load and removes a value that fails, so a connector needs no checksum of its own.

    **Threads.** Methods run on daemon threads of the engine: up to eight loads, and one save or touch per replica, at
    the same time as one removal and one lookup. So every method must be thread-safe. `lookup` is called for every block
    of a prompt while the engine thread waits, so it must return at once, from an index in memory. If the lookups of a
    prompt take over 50 ms, the engine continues without them, and starts no others until they end. All other methods
    may block. Threads of the connector itself must be daemon threads, or end in `close`: otherwise the process does not
    exit.

    **Optional methods.** `lookup_all(keys) -> Sequence[bool]` looks up the blocks of a prompt in one call, instead of
    `lookup`. `load_all(keys, into) -> Sequence[bool]` and `save_all(keys, values) -> Sequence[bool]` load and save
    several blocks in one call, for stores in which a call costs more than a block; a class has both or neither. Their
    values are independent: one that is missing or finds no room does not affect the others. An attribute or property
    `max_batch` limits the number of blocks in one call (default: 64). `check_config(extra_config)`, a static or class
    method, raises `InvalidArgument` before weights are read.

    **Limits.** The engine starts at most 64 MiB of saves per second while requests run, and 1 GiB while none runs. A
    group waits for loads only while they are faster than computing, and never longer than computing would take. If a
    call hangs, its thread and its block in host memory stay occupied, and requests compute.

    **Errors.** An exception of any method, or a call that takes over 60 seconds, disables the connector until the next
    start: it is logged with its traceback and counted (`jpaged:external_failures_total`), and requests continue. A
    value that is gone is not an error. If `reset` raises, the engine calls `remove` for the keys that it has seen, and
    uses no block until the next start, which finds what is still stored.
    """

    @property
    def num_blocks(self) -> int:
        """Return the number of stored values, for metrics, read after other calls. An attribute or method works too."""
        ...

    def lookup(self, key: bytes) -> bool:
        """Return True if `load` would probably find the key. Must return at once."""
        ...

    def load(self, key: bytes, into: memoryview) -> bool:
        """Copy a value to `into`, `[value_bytes]`; return False if the store no longer has it."""
        ...

    def save(self, key: bytes, value: memoryview) -> bool:
        """Store a value, `[value_bytes]`, which is valid only during the call; return False if it was not stored.

        To make room, remove other keys, the least recently used first.
        """
        ...

    def touch(self, keys: Iterable[bytes]) -> None:
        """Record that keys were used without a load, because the engine's memory had them; some may be unknown."""
        ...

    def remove(self, key: bytes) -> None:
        """Remove a key, which may be unknown."""
        ...

    def reset(self) -> None:
        """Remove all keys of this identity."""
        ...

    def close(self) -> None:
        """Write what is buffered and release resources. The last call, when no other is pending; has five seconds."""
        ...


ConnectorClass = Callable[[KVConnectorConfig], KVConnector]
KeySearch = Callable[[Callable[[bytes], bool]], object]
BlockToSave = tuple[bytes, memoryview, Callable[[], bool]]
"""Arguments of `ConnectorStore.save`: key, contents, and a callback that returns False if the block is not needed."""
_MAX_BATCH = 64
"""Blocks in one call of a connector that does not state a limit."""
_METHODS = ("lookup", "load", "save", "touch", "remove", "reset", "close")


class ConnectorStore(Protocol):
    """Store of blocks as the engine uses it: thread-safe, verified, counted, and off after an error.

    `lookup`, `remove`, `reset`, `counts` and `is_on` never block. `load`, `save` and `touch` may, and `refresh` for a
    bounded time.
    """

    @property
    def is_on(self) -> bool:
        """Return False after an error: no key is found any more."""
        ...

    @property
    def counts(self) -> StoreCounts:
        """Return a snapshot of the counters."""
        ...

    def lookup(self, key: bytes) -> bool:
        """Return True if the index has the key at this moment. Any thread may ask."""
        ...

    def refresh(self, search: KeySearch, keys: Sequence[bytes] = ()) -> None:
        """Enter the stored keys that a search looks up in the index; return after 50 ms in any case.

        Args:
            search: calls its argument, which returns True if a key is stored, for keys; may run on another thread.
            keys: those that the search may look up, for stores that look up several at once.
        """
        ...

    @property
    def max_batch(self) -> int:
        """Return the maximum number of blocks of one call; 1 if threads that load one block each are faster."""
        ...

    def load(self, key: bytes, into: memoryview) -> bool:
        """Load the contents of a block, `[bytes_per_block]`; return True if they are valid."""
        ...

    def load_all(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> Sequence[bool]:
        """Load several blocks, as `load`; return which are valid."""
        ...

    def save(self, key: bytes, contents: memoryview, is_wanted: Callable[[], bool]) -> bool:
        """Store the contents of a block; return True if it is stored.

        Args:
            is_wanted: called last; False cancels the call. `remove` finds the block afterwards.
        """
        ...

    def save_all(self, blocks: Sequence[BlockToSave]) -> Sequence[bool]:
        """Store several blocks, as `save`; return which are stored."""
        ...

    def touch(self, keys: Iterable[bytes]) -> None:
        """Record that these keys were used elsewhere just now."""
        ...

    def remove(self, key: bytes) -> None:
        """Remove a key, so that `lookup` is False from now on."""
        ...

    def reset(self) -> int:
        """Remove all keys; return their number."""
        ...

    def add_removal_listener(self, listener: Callable[[bytes | None], None]) -> None:
        """Register a callback for each removed key, on any thread; None stands for all keys.

        The callback may only use `lookup`. An error only changes `is_on`.
        """
        ...

    def check(self) -> None:
        """Raise InternalError if the bookkeeping is wrong."""
        ...

    def share(self) -> ConnectorStore:
        """Return this store for one more user, who must close it too."""
        ...

    def close(self) -> None:
        """End one user's use. No call may be pending."""
        ...


@dataclass(frozen=True, slots=True)
class ConnectorCounts:
    """Counters of a tier since the start.

    Attributes:
        num_tokens: prompt tokens loaded.
        num_fallbacks: groups that computed blocks that failed to load or did not load in time.
        store: counters of the store, which several tiers may share.
    """

    store: StoreCounts
    num_tokens: int = 0
    num_fallbacks: int = 0
    is_on: bool = True


@dataclass(frozen=True, slots=True)
class EngineStore:
    """One engine's share of a store.

    Attributes:
        store: owned by the engine until it stops; other engines may share it.
        tier: name of the store in KV events and in the fields of `jpaged.server_load.EngineLoad`.
        threads: executors for loads and for writes; None creates them.
    """

    store: ConnectorStore
    tier: StoreTier = "disk"
    threads: tuple[Executor, Executor] | None = None


def import_connector(options: KVTransferOptions) -> ConnectorClass:
    """Import the class of a connector.

    Raises:
        InvalidArgument: the module or the class cannot be imported, the class lacks a method or has an async one, or
            its `check_config` rejects the options.
    """
    path, name = options.kv_connector_module_path, options.kv_connector
    try:
        module = importlib.import_module(path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        problem = f"{path} cannot be imported: {type(error).__name__}: {error}"
        raise InvalidArgument("kv_transfer_config.kv_connector_module_path", problem) from error
    kind = getattr(module, name, None)
    if not inspect.isclass(kind):
        raise InvalidArgument("kv_transfer_config.kv_connector", f"{path} has no class {name}")
    missing = [method for method in _METHODS if not callable(getattr(kind, method, None))]
    if missing:
        raise InvalidArgument(
            "kv_transfer_config.kv_connector",
            f"{name} lacks {', '.join(missing)}: it must implement jpaged.engine.kv_cache.connector.KVConnector, which "
            "differs from vLLM's KVConnectorBase_V1",
        )
    if callable(getattr(kind, "load_all", None)) != callable(getattr(kind, "save_all", None)):
        raise InvalidArgument(
            "kv_transfer_config.kv_connector", f"{name} must have both load_all and save_all, or none"
        )
    for method in (*_METHODS, "num_blocks", "lookup_all", "load_all", "save_all"):
        if inspect.iscoroutinefunction(getattr(kind, method, None)):
            problem = f"{name}.{method} is async: it must be a plain method, which threads of the engine call"
            raise InvalidArgument("kv_transfer_config.kv_connector", problem)
    if (check := getattr(kind, "check_config", None)) is not None:
        check(options.kv_connector_extra_config)
    return cast(ConnectorClass, kind)


def open_store(options: CacheOptions, blocks: HostBlocks) -> tuple[StoreTier, ConnectorStore]:
    """Open the store that the options select, and return its name in KV events and metrics.

    Raises:
        InvalidArgument: no option selects a store, or it cannot be used.
    """
    transfer = options.kv_transfer
    if transfer is not None:
        return "external", ConnectorGuard(import_connector(transfer), transfer, blocks)
    if options.kv_disk_dir is None:
        raise InvalidArgument("kv_disk_space", "is 0, and there is no kv_transfer_config")
    max_bytes = int(options.kv_disk_space * 2**30)
    return "disk", BlockStore(Path(options.kv_disk_dir), blocks.kv_identity(), blocks.bytes_per_block, max_bytes)


class ConnectorGuard:
    """Implementation of `ConnectorStore` over a third party's connector.

    Args:
        create: class of the connector.
        lookups: executor of `refresh`; None creates one thread.

    Raises:
        InvalidArgument: the connector's constructor failed, or its `num_blocks` is not a number.
    """

    def __init__(
        self,
        create: ConnectorClass,
        options: KVTransferOptions,
        blocks: HostBlocks,
        lookups: Executor | None = None,
    ) -> None:
        self._name = options.kv_connector
        self._identity = blocks.kv_identity()
        self._bytes_per_block = blocks.bytes_per_block
        self._value_bytes = blocks.bytes_per_block + CHECKSUM_BYTES
        self._lock = threading.RLock()
        self._num_users = 1
        self._is_on = True
        self._counts = StoreCounts()
        self._listeners: list[Callable[[bytes | None], None]] = []
        self._known: dict[bytes, None] = {}  # the index, the oldest first
        self._removals: dict[bytes | None, int] = {}  # pending ones of each key; None is a reset
        self._num_removals = 0  # begins and ends of removals
        self._calls: dict[object, tuple[str, float]] = {}  # running ones, the oldest first: name and begin
        self._slow_search: Future[Any] | None = None
        config = KVConnectorConfig(
            self._identity,
            self._value_bytes,
            dict(options.kv_connector_extra_config),
            self._on_removed,
        )
        try:
            self._connector = create(config)
            self._counts = replace(self._counts, num_blocks=_num_blocks(self._connector))
        except (InvalidArgument, KeyboardInterrupt):
            raise
        except BaseException as error:
            problem = f"{self._name} cannot start: {type(error).__name__}: {error}"
            raise InvalidArgument("kv_transfer_config.kv_connector", problem) from error
        self._lookup_all: Callable[[Sequence[bytes]], Sequence[bool]] | None
        self._lookup_all = getattr(self._connector, "lookup_all", None)
        is_batching = callable(getattr(self._connector, "load_all", None))
        self.max_batch = max(1, int(getattr(self._connector, "max_batch", _MAX_BATCH))) if is_batching else 1
        self._threads = DaemonThreadPool(1, "jpaged-connector-remove")
        self._lookups = lookups or DaemonThreadPool(1, "jpaged-connector-lookup")

    @property
    def is_on(self) -> bool:
        return self._is_on

    @property
    def counts(self) -> StoreCounts:
        with self._lock:
            oldest = next(iter(self._calls.values()), None)
            if self._is_on and oldest is not None and time.monotonic() - oldest[1] > _CALL_TIMEOUT_S:
                self._disable(oldest[0], TimeoutError(f"no result after {_CALL_TIMEOUT_S:g} s"))
            return replace(self._counts, num_blocks=self._counts.num_blocks * self._is_on)

    def lookup(self, key: bytes) -> bool:
        return key in self._known and self._is_findable(key)

    def refresh(self, search: KeySearch, keys: Sequence[bytes] = ()) -> None:
        slow = self._slow_search
        if not self._is_on or (slow is not None and not slow.done()):
            return
        try:
            call = self._lookups.submit(self._search, search, keys)
        except RuntimeError:  # closed
            return
        try:
            call.result(_LOOKUP_WAIT_S)
        except FutureTimeout:
            if slow is None:
                problem = "KV connector %s: lookups of a prompt take over %g s: requests continue without them"
                logger.warning(problem, self._name, _LOOKUP_WAIT_S)
            self._slow_search = call

    def load(self, key: bytes, into: memoryview) -> bool:
        return self.load_all([key], [into])[0]

    def load_all(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> Sequence[bool]:
        if not all(map(self._is_findable, keys)):
            if len(keys) > 1:
                return [self.load(key, one) for key, one in zip(keys, into, strict=True)]
            return [False] * len(keys)
        values, begin_s = [bytearray(self._value_bytes) for _ in keys], time.monotonic()
        num_removals = self._num_removals
        try:
            with self._timed("load"):
                are_found = self._load_values(keys, [memoryview(value) for value in values])
        except BaseException as error:
            self._disable("load", error)
            return [False] * len(keys)
        loads = zip(keys, values, into, are_found, strict=True)
        are_valid = [is_found and self._take_value(key, value, one) for key, value, one, is_found in loads]
        for key, is_found in zip(keys, are_found, strict=True):
            if not is_found:
                self._remove_known(key)
        if num_read := sum(are_valid):
            self._add_known([key for key, is_valid in zip(keys, are_valid, strict=True) if is_valid], num_removals)
            num_bytes = num_read * self._bytes_per_block
            self._count(num_read=num_read, read_bytes=num_bytes, read_s=time.monotonic() - begin_s)
        return are_valid

    def save(self, key: bytes, contents: memoryview, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        return self.save_all([(key, contents, is_wanted)])[0]

    def save_all(self, blocks: Sequence[BlockToSave]) -> Sequence[bool]:
        begin_s, num_removals = time.monotonic(), self._num_removals
        with self._timed("lookup"):
            keys = [key for key, _, _ in blocks]
            stored = self._query_all(keys) or {key: self._query(key) for key in keys}
        self._add_known([key for key in keys if stored[key] and self._is_findable(key)], num_removals)
        missing = [block for block in blocks if not stored[block[0]]]
        saved: set[bytes] = set()
        try:
            if missing and self._is_on:
                saved.update(self._save_values(missing))
        except BaseException as error:
            self._disable("save", error)
            return [False] * len(blocks)
        if saved:
            self._add_known(saved, num_removals)
            num_bytes = len(saved) * self._bytes_per_block
            self._count(num_written=len(saved), written_bytes=num_bytes, write_s=time.monotonic() - begin_s)
            self._count_blocks()
        return [self._is_on and key in saved for key in keys]

    def touch(self, keys: Iterable[bytes]) -> None:
        self._call("touch", lambda: self._connector.touch(keys))

    def remove(self, key: bytes) -> None:
        self._remove(key, "remove", lambda: self._connector.remove(key))

    def reset(self) -> int:
        num_blocks, known = self.counts.num_blocks, [*self._known]
        self._remove(None, "reset", lambda: self._reset(known))
        return num_blocks

    def add_removal_listener(self, listener: Callable[[bytes | None], None]) -> None:
        with self._lock:
            self._listeners.append(listener)

    def check(self) -> None:
        """Do nothing: the connector has no bookkeeping that the engine could check."""

    def share(self) -> ConnectorGuard:
        with self._lock:
            self._num_users += 1
        return self

    def close(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
        self._lookups.shutdown(wait=False)
        closed = self._threads.submit(self._close)  # after pending removals
        self._threads.shutdown(wait=False)
        if self._counts.num_dropped:
            logger.warning("KV connector %s: dropped %d damaged blocks in all", self._name, self._counts.num_dropped)
        try:
            error = closed.exception(_CLOSE_S)
        except FutureTimeout:
            logger.error("KV connector %s did not close within %g s", self._name, _CLOSE_S)
            return
        if error is not None:
            logger.error("KV connector %s failed in close", self._name, exc_info=error)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._is_on = False
        if self._slow_search is not None:
            wait_for([self._slow_search])
        self._connector.close()

    def _reset(self, known: Iterable[bytes]) -> None:
        """Remove all keys; if that fails, remove the known ones singly and raise the error."""
        try:
            self._connector.reset()
        except BaseException:
            num_removed = 0
            with suppress(Exception):
                for key in known:
                    self._connector.remove(key)
                    num_removed += 1
            problem = "KV connector %s: reset failed; removed %d keys instead: the next start finds any others"
            logger.error(problem, self._name, num_removed)
            raise

    def _is_findable(self, key: bytes) -> bool:
        """Return False if the connector is off, or a removal of the key is pending."""
        return self._is_on and key not in self._removals and None not in self._removals

    def _search(self, search: KeySearch, keys: Sequence[bytes]) -> None:
        found: dict[bytes, None] = {}
        num_removals = self._num_removals
        with self._timed("lookup"):
            looked_up = self._query_all(keys)

            def is_stored(key: bytes) -> bool:
                if looked_up[key] and self._is_findable(key) if key in looked_up else self._query(key):
                    found[key] = None
                return key in found

            search(is_stored)
        self._add_known(found, num_removals)
        self._count_blocks()

    def _query(self, key: bytes) -> bool:
        """Return True if the connector has a key. May block."""
        try:
            return self._is_findable(key) and bool(self._connector.lookup(key))
        except BaseException as error:
            self._disable("lookup", error)
            return False

    def _load_values(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> Sequence[bool]:
        """Load values by as few calls as possible; return which were found."""
        if self.max_batch == 1:
            return [bool(self._connector.load(key, one)) for key, one in zip(keys, into, strict=True)]
        found: Sequence[bool] = cast(Any, self._connector).load_all(keys, into)
        return [bool(one) for one, _ in zip(found, keys, strict=True)]

    def _take_value(self, key: bytes, value: bytearray, into: memoryview) -> bool:
        """Copy the contents of a value, unless its checksum is wrong; then drop the block."""
        contents = memoryview(value)[: self._bytes_per_block]
        if self._checksum(key, contents) != value[self._bytes_per_block :]:
            self._drop(key)
            return False
        into[:] = contents
        return True

    def _save_values(self, blocks: Sequence[BlockToSave]) -> Iterator[bytes]:
        """Save blocks by as few calls as possible; yield the keys of those that are stored and still needed."""
        values = [bytes(contents) + self._checksum(key, contents) for key, contents, _ in blocks]
        views = [memoryview(value) for value in values]
        with self._timed("save"):
            if self.max_batch == 1:
                pairs = zip(blocks, views, strict=True)
                are_saved = [bool(self._connector.save(key, view)) for (key, _, _), view in pairs]
            else:
                are_saved = list(cast(Any, self._connector).save_all([key for key, _, _ in blocks], views))
            for (key, _, is_wanted), is_saved in zip(blocks, are_saved, strict=True):
                if is_saved and is_wanted():
                    yield key
                elif is_saved:
                    self._connector.remove(key)

    def _query_all(self, keys: Sequence[bytes]) -> dict[bytes, bool]:
        """Return which of these keys a connector with `lookup_all` has; {} of any other. May block."""
        if self._lookup_all is None or not keys or not self._is_on:
            return {}
        try:
            return dict(zip(keys, self._lookup_all(keys), strict=True))
        except BaseException as error:
            self._disable("lookup_all", error)
            return {}

    def _add_known(self, keys: Iterable[bytes], num_removals: int) -> None:
        """Enter keys in the index, unless a removal began or ended since `num_removals` was read."""
        with self._lock:
            if num_removals != self._num_removals:
                return
            for key in keys:
                self._known.pop(key, None)
                self._known[key] = None
            for _ in range(len(self._known) - _MAX_KNOWN):
                del self._known[next(iter(self._known))]

    def _remove_known(self, key: bytes) -> None:
        with self._lock:
            self._known.pop(key, None)
        self._notify(key)

    def _count_blocks(self) -> None:
        """Read the connector's number of blocks, after a call that may have changed it."""
        if not self._is_on:
            return
        try:
            with self._timed("num_blocks"):
                num_blocks = _num_blocks(self._connector)
        except BaseException as error:
            self._disable("num_blocks", error)
            return
        with self._lock:
            self._counts = replace(self._counts, num_blocks=num_blocks)

    def _checksum(self, key: bytes, contents: memoryview) -> bytes:
        """Return the hash of a block; releases the GIL."""
        found = hashlib.sha256(self._identity + bytes([len(key)]) + key)
        found.update(contents)
        return found.digest()

    def _remove(self, key: bytes | None, name: str, call: Callable[[], None]) -> None:
        """Run a removal on a thread; `lookup` is False until it has run."""

        def clear() -> None:
            self._num_removals += 1
            if key is None:
                self._known.clear()
            else:
                self._known.pop(key, None)

        with self._lock:
            clear()
            self._removals[key] = self._removals.get(key, 0) + 1

        def run() -> None:
            self._call(name, call)
            self._count_blocks()
            with self._lock:
                clear()  # a save may have entered it while the removal was pending
                self._removals[key] -= 1
                if not self._removals[key]:
                    del self._removals[key]

        try:
            self._threads.submit(run)
        except RuntimeError:  # closed
            return
        self._notify(key)

    def _drop(self, key: bytes) -> None:
        self._count(num_dropped=1)
        if self._counts.num_dropped == 1:
            logger.warning("KV connector %s: dropped a damaged block; further ones are only counted", self._name)
        self._call("remove", lambda: self._connector.remove(key))
        self._remove_known(key)

    def _call(self, name: str, call: Callable[[], None]) -> None:
        """Run a call that may raise."""
        if not self._is_on:
            return
        try:
            with self._timed(name):
                call()
        except BaseException as error:
            self._disable(name, error)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Mark a call as running, so that `counts` notices if it hangs."""
        call = object()
        with self._lock:
            self._calls[call] = (name, time.monotonic())
        try:
            yield
        finally:
            with self._lock:
                del self._calls[call]

    def _on_removed(self, key: bytes) -> None:
        self._count(num_evicted=1)
        self._remove_known(key)

    def _notify(self, key: bytes | None) -> None:
        for listener in self._listeners:
            listener(key)

    def _count(self, **more: float) -> None:
        with self._lock:
            self._counts = replace(
                self._counts, **{name: getattr(self._counts, name) + number for name, number in more.items()}
            )

    def _disable(self, name: str, error: BaseException) -> None:
        """Turn the connector off. Errors include `asyncio.CancelledError`, `SystemExit` and panics of Rust modules."""
        if isinstance(error, KeyboardInterrupt):  # of the process, not of the connector
            raise error
        with self._lock:
            if self._is_on:
                logger.error("KV connector %s is now off: %s failed", self._name, name, exc_info=error)
            self._is_on = False
        self._count(num_failures=1)


def _num_blocks(connector: Any) -> int:
    """Return the number of blocks of a connector.

    Raises:
        InvalidArgument: it has none, or not as a number.
    """
    try:
        found = connector.num_blocks
        return operator.index(found() if callable(found) else found)
    except (AttributeError, TypeError) as error:
        problem = f"{type(connector).__name__}.num_blocks must be an int, as an attribute, property or plain method"
        raise InvalidArgument("kv_transfer_config.kv_connector", f"{problem}: {error}") from error


class TransferRate:
    """Time of a transfer as a constant and a rate, fitted to recent transfers, each of which counts less than the next.

    Args:
        bytes_per_s, latency_s: assumed before there are measurements.
    """

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._assumed = latency_s, 1 / bytes_per_s
        first = 10 * latency_s * bytes_per_s
        self._sums = (2.0, first, latency_s * 12, first**2, first * latency_s * 11)  # 1, x, y, xx, xy of two points
        self._factor = 1.0

    def record(self, num_bytes: int, seconds: float) -> None:
        """Add a transfer."""
        weight, x, y, xx, xy = (_RATE_MEMORY * old for old in self._sums)
        y, xy, self._factor = y * self._factor, xy * self._factor, 1.0
        self._sums = weight + 1, x + num_bytes, y + seconds, xx + num_bytes**2, xy + num_bytes * seconds

    def speed_up(self, num_bytes: int) -> None:
        """Reduce the time slightly, to the assumed one at least, so that a slow store is tried again."""
        assumed_s = self._assumed[0] + num_bytes * self._assumed[1]
        self._factor = min(
            self._factor, max(self._factor / _BELIEF, assumed_s * self._factor / self.seconds(num_bytes))
        )

    def seconds(self, num_bytes: int) -> float:
        """Return the time of a transfer."""
        latency_s, s_per_byte = self._fit()
        return self._factor * (latency_s + num_bytes * s_per_byte)

    @property
    def latency_s(self) -> float:
        """Return the constant part of a transfer's time."""
        return self._factor * self._fit()[0]

    @property
    def bytes_per_s(self) -> float:
        """Return the rate without the constant part."""
        return 1 / (self._factor * self._fit()[1])

    def _fit(self) -> tuple[float, float]:
        """Return the constant and the seconds per byte: a line of least squares through no negative value."""
        weight, x, y, xx, xy = self._sums
        variance, slope = weight * xx - x * x, weight * xy - x * y
        if variance > 1e-6 * weight * xx and slope > 0 and (constant := y - x * slope / variance) >= 0:
            return constant / weight, slope / variance
        return (0.0, y / x) if x and slope > 0 else (y / weight, self._assumed[1])


class PrefillRate:
    """Time to compute tokens of a prompt: that of the rates at start, times an average of measured by expected times.

    Only steps of several tokens count, because those of decoding rows have another cost.
    """

    def __init__(self, rates: DeviceRates) -> None:
        self._rates = rates
        self._slowness = 1.0

    def record(self, num_tokens: int, num_padded: int, num_steps: int, seconds: float) -> None:
        """Add a dispatch. Any thread may read, one may write."""
        if num_steps != 1 or num_tokens < _MIN_PREFILL_TOKENS:
            return
        sizes = self._rates.forward_s
        expected_s = sizes[min(bisect_left(sizes, (num_padded, 0.0)), len(sizes) - 1)][1]
        expected_s += self._rates.pair_s * num_tokens**2 / 2
        if expected_s > 0:
            measured = min(max(seconds / expected_s, 1 / _MAX_SLOWNESS), _MAX_SLOWNESS)
            self._slowness = _RATE_MEMORY * self._slowness + (1 - _RATE_MEMORY) * measured

    def seconds(self, begin: int, end: int) -> float:
        """Return the time to compute the tokens `begin` to `end` of a prompt."""
        return self._slowness * self._rates.prefill_s(begin, end)


_Call = tuple[Future[Any], Callable[[], Any]]


class DaemonThreadPool(Executor):
    """Executor that starts calls in the order of submission, on daemon threads.

    Unlike with `ThreadPoolExecutor`, a hanging call never prevents the process from exiting.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_over = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._is_over:
                raise RuntimeError("calls are not accepted after shutdown")
            self._calls.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop the threads after the submitted or the running calls; a later call with `wait` joins them."""
        with self._lock:
            self._is_over = True
        while cancel_futures:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                break
            if call is not None and call[0].cancel():
                call[0].set_running_or_notify_cancel()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # raised by the caller's `result()`
                future.set_exception(error)
