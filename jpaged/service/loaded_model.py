"""A loaded model as the server sees it: an engine, an input processor, a tokenizer and LoRA adapters.

`Adapters` is the registry of LoRA adapters by name:

    load("sql", path)      reads the files; the name is reserved from the start of the read
    find("sql")            returns the adapter; a request keeps it even if the name is unloaded later
    unload("sql")          removes the name from lookups

The engine decides which adapters are in device slots. Reloading a name creates a new adapter with a new number. Cached
prefixes of the old adapter match only if both have the same matrices.

Host memory keeps the matrices of the `max_in_memory` adapters that were used last. The engine reads others again
(`LoadedAdapter.fetch`) when a request that needs them is next. Adapters in device slots need no copy in host memory.

`WeightUpload` collects weights that a client sends:

    8 bytes    size of the header
    header     JSON: for each tensor its type, shape and place in the data
    data       all tensors, one after the other

That is a safetensors file. The model checks names, shapes and types when the header is complete, before memory for the
data is allocated: that of the model's tensors, and of those that it ignores, such as rotary frequencies.

`Admission` submits the requests of calls in the caller's process, each of which is a `SubmittedCall`.

`RoleCounts` counts what servers of a role do. The event loop updates it; any thread may read it.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np
import orjson
from numpy.typing import NDArray

from jpaged.config import EngineConfig, ServerOptions
from jpaged.engine.core import PauseMode
from jpaged.engine.executor import BlockPort, Geometry, SleepTag
from jpaged.engine.inspector import PoolInspector
from jpaged.engine.kv_cache.offload.transfer import KVTransfer
from jpaged.engine.sequence import OutputCallback
from jpaged.engine.stats import HistogramSnapshot
from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import AlreadyExists, InvalidArgument, JpagedError, NotFound, Unsupported, describe_error
from jpaged.server_load import EngineLoad, RoleLoad
from jpaged.service.calls import require_name
from jpaged.service.input_processor import InputProcessor
from jpaged.service.structured_output.compiler import ServedGrammars
from jpaged.service.tokenizer import HuggingFaceTokenizer
from jpaged.types import (
    Adapter,
    FinishReason,
    LoadedAdapter,
    ModelInfo,
    OutputEvent,
    Pooling,
    Request,
    SequenceFinish,
    require_whole_characters,
)

if TYPE_CHECKING:
    from jpaged.service.image_inputs import ImageInputs, ImageProcessor, VisionEncoder

MAX_ADAPTERS = 1 << 16
"""Default limit of loaded adapters: of those outside host memory, each takes about 1 KB."""


class Adapters:
    """Registry of adapters by name. Thread-safe.

    Args:
        read: reads the matrices of a path; None if the model takes no adapters.
        max_in_memory: maximum number of adapters in host memory; `load` and `fetch` exceed it by one for a moment.
        model_name: name of the model; no adapter may use it, because the `model` field of a body selects either.
        aliases: further names of the model.
        max_num: maximum number of loaded adapters.

    Attributes:
        max_num: as above.
    """

    def __init__(
        self,
        read: Callable[[str], Adapter] | None = None,
        max_in_memory: int = 0,
        model_name: str | None = None,
        aliases: tuple[str, ...] = (),
        max_num: int = MAX_ADAPTERS,
    ) -> None:
        self._model_names = (model_name, *aliases)
        self._read = read
        self.max_num = max_num
        self._max_in_memory = max_in_memory
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._adapters: dict[str, LoadedAdapter] = {}
        self._names_in_load: set[str] = set()
        # By number, the least recently used first. Weak: unloaded adapters leave memory with their last request.
        self._in_memory: OrderedDict[int, weakref.ref[LoadedAdapter]] = OrderedDict()
        self._reader = ThreadPoolExecutor(1, "jpaged-adapters")

    def find(self, name: str) -> LoadedAdapter:
        """Return the adapter with this name.

        Raises:
            NotFound: no adapter with this name is loaded.
            Unsupported: the model takes no adapters.
        """
        self._require_on()
        with self._lock:
            adapter = self._find(name, "adapter")
            if adapter.number in self._in_memory:
                self._in_memory.move_to_end(adapter.number)
            return adapter

    def named(self, given: str | LoadedAdapter) -> LoadedAdapter | None:
        """Resolve a name with `find`; return a `LoadedAdapter` unchanged, and None for ""."""
        if isinstance(given, str):
            return self.find(given) if given else None
        return given

    def load(self, name: str, path: str, *, replaces: bool = False) -> LoadedAdapter:
        """Read an adapter from disk and register it under a name. Blocks while the files are read.

        Args:
            replaces: the name may be in use; requests that use the former adapter continue with it.

        Raises:
            AlreadyExists: the name is taken.
            InvalidArgument: the name or path is invalid, too many adapters are loaded, or the files cannot be parsed.
            NotFound: the path does not exist.
            Unsupported: the model takes no adapters, or not this kind.
        """
        read = self._require_on()
        require_name("name", name)
        if name in self._model_names:
            raise InvalidArgument("name", f"{name!r} is the name of the model: choose another for the adapter")
        if not path:
            raise InvalidArgument("path", "is empty: name the folder of the adapter")
        require_whole_characters("path", path)
        with self._lock:
            if name in self._names_in_load or (name in self._adapters and not replaces):
                state = "being loaded; wait" if name in self._names_in_load else "loaded; unload it"
                raise AlreadyExists(f"adapter {name!r} is {state}, or choose another name")
            names = self._names_in_load | self._adapters.keys()
            if name not in names and len(names) >= self.max_num:
                raise InvalidArgument("name", f"{len(names)} adapters are loaded, the limit is {self.max_num}")
            self._names_in_load.add(name)
        adapter: LoadedAdapter | None = None
        try:
            adapter = LoadedAdapter(name, path, next(self._numbers), read(path), self._read_again)
        except InvalidArgument as error:
            raise InvalidArgument("path", str(error) if error.field != "lora" else error.problem) from error
        except OSError as error:
            raise InvalidArgument("path", f"{path} cannot be read: {error}") from error
        finally:
            with self._lock:
                self._names_in_load.remove(name)
                if adapter is not None:
                    self._adapters[name] = adapter
                    self._keep(adapter)
        return adapter

    def num_in_memory(self) -> int:
        """Return the number of adapters in host memory."""
        with self._lock:
            alive = [adapter for ref in self._in_memory.values() if (adapter := ref()) is not None]
            return len(alive)

    def _keep(self, adapter: LoadedAdapter) -> None:
        """Count an adapter's matrices as used last, and free those of the least recently used adapters."""
        self._in_memory[adapter.number] = weakref.ref(adapter)
        self._in_memory.move_to_end(adapter.number)
        if len(self._in_memory) <= self._max_in_memory:
            return
        for number, ref in tuple(self._in_memory.items()):
            if ref() is None:
                del self._in_memory[number]
        while len(self._in_memory) > self._max_in_memory:
            _, ref = self._in_memory.popitem(last=False)
            if (evicted := ref()) is not None:
                evicted.set_matrices(None)

    def _read_again(self, adapter: LoadedAdapter) -> Future[Adapter]:
        """Start to read the matrices of an adapter that has left host memory, on a thread, one at a time."""
        return self._reader.submit(self._restore, adapter)

    def _restore(self, adapter: LoadedAdapter) -> Adapter:
        """Read the matrices of an adapter again, unless another replica has.

        Raises:
            NotFound: the files cannot be read, or have changed.
        """
        matrices = adapter.matrices
        if matrices is None:
            what = f"adapter: the files of {adapter.name!r}, which left host memory,"
            try:
                matrices = self._require_on()(adapter.path)
            except (JpagedError, OSError) as error:
                raise NotFound(f"{what} cannot be read again: {error}") from error
            if matrices.digest != adapter.digest:
                raise NotFound(f"{what} have changed since it was loaded: load it again")
        with self._lock:
            adapter.set_matrices(matrices)
            self._keep(adapter)
        return matrices

    def unload(self, name: str) -> None:
        """Unload an adapter. Requests that already use it continue.

        Raises:
            NotFound: no adapter with this name is loaded.
        """
        self._require_on()
        with self._lock:
            self._find(name, "name")
            del self._adapters[name]

    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """Return the adapters that requests can use, in the order of loading."""
        with self._lock:
            return tuple(self._adapters.values())

    def names(self) -> frozenset[str]:
        """Return the names of the adapters that requests can use."""
        return frozenset(adapter.name for adapter in self.loaded())

    def _find(self, name: str, field: str) -> LoadedAdapter:
        adapter = self._adapters.get(name)
        if adapter is not None:
            return adapter
        if name in self._names_in_load:
            raise NotFound(f"{field}: adapter {name!r} is being loaded; try again later")
        raise NotFound(f"{field}: no adapter {name!r} is loaded")

    def _require_on(self) -> Callable[[str], Adapter]:
        if self._read is None:
            raise Unsupported("adapters are off: set enable_lora (--enable-lora)")
        return self._read


_LOG = logging.getLogger(__name__)
_QUIET_S = 10.0
_MAX_FIELDS = 64


_HEADER_BYTES = 8
_MAX_HEADER_BYTES = 32 << 20
"""Maximum bytes of the header: those of 200,000 tensors."""
_STORED_TYPES: Mapping[str, type[np.generic]] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class WeightUpload:
    """The bytes of a safetensors file, as a client sends them in order. Used by one thread at a time.

    Attributes:
        num_bytes: bytes received.

    Args:
        check: raises an error if a model has no tensors of these names, shapes and types; the arrays hold zeros.
    """

    def __init__(self, check: Callable[[Mapping[str, NDArray[Any]]], None]) -> None:
        self.num_bytes = 0
        self._check = check
        self._header = bytearray()
        self._data: NDArray[np.uint8] | None = None
        self._places: dict[str, tuple[np.dtype[Any], tuple[int, ...], int, int]] = {}

    @property
    def has_header(self) -> bool:
        """True if the next part is only copied."""
        return self._data is not None

    def write(self, part: bytes | memoryview, offset: int | None = None) -> None:
        """Add the next bytes.

        Args:
            offset: place of the first one; bytes that are there already, of a call that was repeated, are skipped.

        Raises:
            InvalidArgument: bytes before them are missing, there are too many, or the header is invalid or not of the
                model.
        """
        if offset is not None:
            if offset > self.num_bytes:
                raise InvalidArgument("offset", f"{offset} is over the {self.num_bytes} bytes that have arrived")
            part = part[self.num_bytes - offset :]
        if self._data is None:
            self._add_to_header(part)
            return
        begin = self.num_bytes - len(self._header)
        if begin + len(part) > len(self._data):
            most = len(self._header) + len(self._data)
            raise InvalidArgument("data", f"{self.num_bytes + len(part)} bytes are over the {most} of the header")
        self._data[begin : begin + len(part)] = np.frombuffer(part, np.uint8)
        self.num_bytes += len(part)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the complete tensors by name, without copies.

        Raises:
            InvalidArgument: some bytes are missing.
        """
        whole = len(self._header) + (0 if self._data is None else len(self._data))
        if self._data is None or self.num_bytes < whole:
            known = "" if self._data is None else f" of {whole}"
            raise InvalidArgument("data", f"ends after {self.num_bytes}{known} bytes")
        data, places = self._data, self._places.items()
        return {name: data[begin:end].view(dtype).reshape(shape) for name, (dtype, shape, begin, end) in places}

    def _add_to_header(self, part: bytes | memoryview) -> None:
        """Add bytes of which some may be data; after an error, no more can be added."""
        self._header += part
        self.num_bytes = len(self._header)
        if self.num_bytes < _HEADER_BYTES:
            return
        size = int.from_bytes(self._header[:_HEADER_BYTES], "little")
        if not 2 <= size <= _MAX_HEADER_BYTES:
            raise InvalidArgument("data", f"has a header of {size} bytes, not of 2 to {_MAX_HEADER_BYTES}")
        if self.num_bytes < _HEADER_BYTES + size:
            return
        rest = self._header[_HEADER_BYTES + size :]
        del self._header[_HEADER_BYTES + size :]
        places, num_data_bytes = _read_places(bytes(self._header[_HEADER_BYTES:]))
        if len(rest) > num_data_bytes:
            raise InvalidArgument("data", f"has more than the {num_data_bytes} bytes of the tensors")
        self._check({name: np.broadcast_to(np.zeros((), one[0]), one[1]) for name, one in places.items()})
        try:
            data = np.empty(num_data_bytes, np.uint8)
        except MemoryError as error:
            problem = f"has {num_data_bytes} bytes, more than this machine has memory for"
            raise InvalidArgument("data", problem) from error
        data[: len(rest)] = rest
        self._places, self._data = places, data


def _read_places(header: bytes) -> tuple[dict[str, tuple[np.dtype[Any], tuple[int, ...], int, int]], int]:
    """Return type, shape and place of each tensor, and the bytes of all.

    Raises:
        InvalidArgument: the header is invalid.
    """
    try:
        fields = orjson.loads(header)
    except ValueError as error:
        raise InvalidArgument("data", f"has a header that is no JSON: {str(error)[:80]}") from error
    if not isinstance(fields, dict):
        raise InvalidArgument("data", "has a header that is no JSON object")
    places = {name: _read_place(name, given) for name, given in fields.items() if name != "__metadata__"}
    last = 0
    for name, (_, _, begin, end) in sorted(places.items(), key=lambda item: item[1][2:]):
        if begin != last:
            raise InvalidArgument("data", f"tensor {name[:80]!r} begins at {begin}, not {last}")
        last = end
    return places, last


def _read_place(name: str, given: Any) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    what = f"tensor {name[:80]!r}"
    fields: dict[str, Any] = given if isinstance(given, dict) else {}
    dtype, shape, place = fields.get("dtype"), _read_numbers(fields, "shape"), _read_numbers(fields, "data_offsets")
    if not isinstance(dtype, str) or dtype not in _STORED_TYPES:
        raise InvalidArgument("data", f"{what} is {str(dtype)[:20]}, not one of {', '.join(_STORED_TYPES)}")
    if shape is None or place is None:
        raise InvalidArgument("data", f"{what} needs a shape and data_offsets")
    found, size = np.dtype(_STORED_TYPES[dtype]), math.prod(shape)
    is_small = math.prod(max(one, 1) for one in shape) < _MAX_NUMBER  # NumPy ignores zeros in its limit
    if len(shape) > _MAX_AXES or not is_small or len(place) != 2 or place[1] - place[0] != size * found.itemsize:
        problem = f"has data_offsets {str(place)[:40]} for shape {str(shape)[:40]}"
        raise InvalidArgument("data", f"{what} {problem}, of {found.itemsize} bytes each")
    return found, tuple(shape), place[0], place[1]


def _read_numbers(fields: Mapping[str, Any], name: str) -> list[int] | None:
    numbers = fields.get(name)
    is_valid = isinstance(numbers, list) and all(type(one) is int and 0 <= one < _MAX_NUMBER for one in numbers)
    return numbers if is_valid else None


_MAX_NUMBER = 1 << 48
_MAX_AXES = 8


class RoleCounts:
    """The counters of one server.

    Attributes:
        num_here: prompts that a decode server computed itself by the rule, per reason.
        num_failed: prompts that it computed itself, entirely or partly, because of a failure, per reason.
    """

    def __init__(self) -> None:
        self.num_here: Counter[str] = Counter()
        self.num_failed: Counter[str] = Counter()
        self._load = RoleLoad()
        self._quiet_until_s: dict[str, float] = {}

    def load(self) -> RoleLoad:
        """Return a snapshot."""
        return self._load

    def here(self, reason: str) -> None:
        """Count a prompt that the rule assigns to this server."""
        self.num_here[reason] += 1

    def note_slow_transfer(self, num_tokens: int, transfer_s: float, compute_s: float) -> None:
        """Count a prompt that is computed here because its transfer would take longer; log at a limited rate."""
        self.here("slower")
        now_s = time.monotonic()
        if now_s >= self._quiet_until_s.get("slower", 0.0):
            self._quiet_until_s["slower"] = now_s + _QUIET_S
            what = "prompt of %d tokens computed locally (%d so far): %.1f ms, next to %.1f ms to transfer its blocks"
            _LOG.info(what, num_tokens, self.num_here["slower"], compute_s * 1e3, transfer_s * 1e3)

    def failed(self, reason: str, error: BaseException) -> None:
        """Count a prompt that is (partly) computed here after a failure; log each reason at a limited rate."""
        self.num_failed[reason] += 1
        now_s = time.monotonic()
        if now_s >= self._quiet_until_s.get(reason, 0.0):
            self._quiet_until_s[reason] = now_s + _QUIET_S
            what = str(error) or type(error).__name__
            _LOG.warning(
                "remote %s failed, prompt computed locally (%d so far): %s", reason, self.num_failed[reason], what
            )

    def note_failed_pull(self, error: BaseException) -> None:
        """Count a failed pull from a data port; the blocks are sent over gRPC, or computed. Log at a limited rate."""
        self.add(num_pulls_failed=1)
        now_s = time.monotonic()
        if now_s >= self._quiet_until_s.get("pull", 0.0):
            self._quiet_until_s["pull"] = now_s + _QUIET_S
            _LOG.warning("pull of blocks failed (%d so far): %s", self._load.num_pulls_failed, describe_error(error))

    def add(self, **counts: float) -> None:
        """Add to counters, by their names in `RoleLoad`."""
        now = {name: getattr(self._load, name) + count for name, count in counts.items()}
        self._load = dataclasses.replace(self._load, **now)


class IgnoredFields:
    """Counts of the unknown fields of requests that were ignored; each is logged once.

    Attributes:
        counts: requests by field, at most 64 of them, and those of all others as "other".
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, names: Iterable[str]) -> None:
        """Count the fields of one request."""
        for name in names:
            is_counted = name in self.counts or len(self.counts) < _MAX_FIELDS
            if is_counted and name not in self.counts:
                _LOG.warning(
                    "unknown field %a of a request is ignored; --unknown-fields refuse makes it an error", name
                )
            self.counts[name if is_counted else "other"] += 1


class EngineClient(Protocol):
    """Interface of `Engine` and `DataParallelEngine`, which document each method.

    Attributes:
        clock: the clock of deadlines, and of `RequestTimes`.
        max_num_in_flight: maximum number of accepted requests.
        inspector: inspector of the KV pools.
        kv_transfer: transfer of prefixes to and from other servers.
        reserve_slot: reserves a slot for a request whose prompt another server computes; returns the transfer object
            that receives its blocks.
    """

    clock: Callable[[], float]
    max_num_in_flight: int
    inspector: PoolInspector
    kv_transfer: KVTransfer
    reserve_slot: Callable[[Request], KVTransfer]

    @property
    def geometry(self) -> Geometry:
        """Geometry of a step; it bounds one request."""

    @property
    def failure(self) -> Exception | None:
        """Error that stopped the engine; None if none."""

    @property
    def is_full(self) -> bool:
        """True if `submit` would raise because the queue is full."""

    def submit(self, request: Request, sink: OutputCallback) -> None: ...

    def abort(self, request_id: str) -> bool: ...

    def drop(self, request_id: str) -> None: ...

    def pin_prefix(
        self,
        name: str,
        token_ids: Iterable[int],
        salt: str = "",
        tenant: str = "",
        adapter: LoadedAdapter | None = None,
    ) -> Future[int]: ...

    def unpin_prefix(self, name: str, tenant: str = "") -> bool: ...

    def reset_prefix_cache(self) -> Future[int]: ...

    def pause(self, mode: PauseMode = "abort") -> Future[None]: ...

    def resume(self) -> Future[None]: ...

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> Future[None]: ...

    def wake_up(self, tags: Collection[str] | None = None) -> Future[bool]: ...

    def update_weights(
        self, weights: object, mode: PauseMode = "keep", version: str | int | None = None
    ) -> Future[str]: ...

    def check_weights(self, weights: object) -> None: ...

    @property
    def weight_version(self) -> str:
        """Version of the weights."""

    @property
    def num_weight_updates(self) -> int:
        """Number of times that the weights were replaced."""

    @property
    def is_paused(self) -> bool:
        """True between `pause` and `resume`, or `sleep` and `wake_up`."""

    @property
    def asleep(self) -> frozenset[SleepTag]:
        """Device memory that is released."""

    @property
    def sleep_level(self) -> int:
        """Level of the sleep that released device memory; 0 if none is."""

    def call_soon(self, command: Callable[[], None]) -> Future[None]: ...

    def load(self) -> EngineLoad: ...

    def replica_loads(self) -> tuple[EngineLoad, ...]:
        """Return the load of each replica; `load` returns the total."""

    def histogram(self, name: str) -> HistogramSnapshot: ...

    def num_ended_by_reason(self) -> dict[str, int]: ...

    def start(self) -> None: ...

    def step(self) -> bool:
        """Run one iteration on the caller's thread, instead of `start`; return False if there was no work."""

    def check(self) -> None: ...

    def drain(self, timeout_s: float) -> bool: ...

    def fail(self, error: Exception, *, hangs: bool = False) -> None:
        """Stop the engine with this error. If it hangs, `stop` does not wait for calls that may never return."""

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BackendFacts:
    """Properties of the backend of all replicas. `attention` is the chosen attention backend."""

    platform: str
    device_kind: str
    num_devices: int
    attention: str
    jax_version: str


class Pooler(Protocol):
    """Conversion of a pooled hidden state into a vector, or into logits of labels."""

    @property
    def pooling(self) -> Pooling:
        """Pooling of requests that name none."""

    @property
    def normalizes(self) -> bool:
        """True if vectors have length 1."""

    @property
    def prompts(self) -> Mapping[str, str]:
        """Texts to put before an input, by name."""

    @property
    def default_prompt(self) -> str | None:
        """Name of the prompt of requests that name none; None for no text."""

    @property
    def can_shorten(self) -> bool:
        """True if vectors may be cut to their first dimensions."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of a classification head; empty for vectors."""

    @property
    def width(self) -> int | None:
        """Numbers of a vector or of logits; None for those of a hidden state."""

    def apply(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return a vector or logits from a pooled state `[E]`."""

    def activate(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return probabilities or scores of logits."""


@dataclass(frozen=True, slots=True)
class Vision:
    """Parts of a model that read images."""

    processor: ImageProcessor
    encoder: VisionEncoder


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model. `config` is resolved; the engine (or its replicas) is not started yet.

    Attributes:
        adapters: adapters that requests may name.
        grammars: grammars of requests with structured output; None if the engine fills no masks.
        role_counts: counters of disaggregated prefill.
        ignored_fields: counters of unknown fields of requests.
        checkpoint: fingerprint of the weights' files.
        hidden_size: numbers of a hidden state; 0 if unknown.
        pooler: of an embedding model or a classifier; None takes the last token's hidden state.
        block_port: data port for blocks; None if there is none.
        vision: image processor and vision encoder; None if the model takes only text.
        images: reads and encodes the images of requests; None if the model takes only text.
    """

    engine: EngineClient
    input_processor: InputProcessor
    tokenizer: Tokenizer
    model: ModelInfo
    backend: BackendFacts
    config: EngineConfig
    adapters: Adapters = field(default_factory=Adapters)
    grammars: ServedGrammars | None = None
    role_counts: RoleCounts = field(default_factory=RoleCounts)
    ignored_fields: IgnoredFields = field(default_factory=IgnoredFields)
    checkpoint: str = ""
    hidden_size: int = 0
    pooler: Pooler | None = None
    block_port: BlockPort | None = None
    vision: Vision | None = None
    images: ImageInputs | None = None

    def update_weights(
        self, weights: object, mode: PauseMode = "keep", version: str | int | None = None
    ) -> Future[str]:
        """Replace the weights; see `Engine.update_weights`.

        Raises:
            Unsupported: the model has a classification head, which is not among the weights of the engine.
        """
        self._require_all_weights()
        return self.engine.update_weights(weights, mode, version)

    def check_weights(self, weights: object) -> None:
        """Check names, shapes and types for `update_weights`; raise as it does."""
        self._require_all_weights()
        self.engine.check_weights(weights)

    def _require_all_weights(self) -> None:
        if self.pooler is not None and self.pooler.labels:
            raise Unsupported("update_weights: is not supported for models with a classification head")

    def with_images(self) -> LoadedModel:
        """Return the model with the images of requests, if it has a vision encoder."""
        if self.vision is None:
            return self
        from jpaged.service.image_inputs import IMAGES_REQUEST_MIB, ImageInputs

        vision, engine, config = self.vision, self.engine, self.config
        images = ImageInputs.from_options(
            vision.processor, vision.encoder, config.media, engine.geometry, lambda: engine.weight_version
        )
        self.input_processor.set_images(images)
        if isinstance(self.tokenizer, HuggingFaceTokenizer):
            self.tokenizer.set_placeholder(vision.processor.placeholder_id)
        limits = images.limits
        model = dataclasses.replace(self.model, max_images=limits.max_images, max_image_pixels=limits.max_pixels)
        if config.server.max_request_size == ServerOptions().max_request_size:
            config = config.replace(max_request_size=IMAGES_REQUEST_MIB)
        return dataclasses.replace(self, images=images, model=model, config=config)

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may use for the model; the first one is its own."""
        return (self.model.name, *self.model.aliases)


class SubmittedCall:
    """The requests of one call.

    Attributes:
        waiting: requests that are not submitted yet.
        running: ids of the requests in the engine.
        put: receives the events of the requests, on the engine thread.
    """

    __slots__ = ("put", "running", "waiting")

    def __init__(self, requests: Sequence[Request], put: OutputCallback) -> None:
        self.waiting = deque(requests)
        self.running: set[str] = set()
        self.put = put


class Admission:
    """Submits the requests of concurrent calls as the engine has capacity, one of each call in turn.

    Requests are submitted on the engine thread: all requests of a call are there before the next step begins.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._calls: deque[SubmittedCall] = deque()
        self.is_paused = False

    def pause(self) -> None:
        """Submit no further request until `resume`."""
        self.is_paused = True

    def resume(self) -> None:
        """Submit the requests that wait, and later ones."""
        self.is_paused = False
        self._wake()

    def add(self, call: SubmittedCall) -> None:
        """Queue a call; each request ends in exactly one event with `is_last`."""
        with self._lock:
            self._calls.append(call)
        self._wake()

    def _wake(self) -> None:
        if self._engine.call_soon(self._fill).cancelled():
            self._fill()  # the engine has ended, so every request is refused individually

    def remove(self, call: SubmittedCall) -> None:
        """Abort the requests of an abandoned call; their slots are free by the next step."""
        with self._lock:
            call.waiting.clear()
            running = list(call.running)
        for request_id in running:
            self._engine.abort(request_id)

    def withdraw(self, call: SubmittedCall) -> None:
        """End the requests of a call that are not submitted yet, as aborted."""
        with self._lock:
            waiting = list(call.waiting)
            call.waiting.clear()
        for request in waiting:
            finish = SequenceFinish(FinishReason.ABORT)
            call.put(OutputEvent(request.request_id, finish=finish, is_last=True))

    def _fill(self) -> None:
        with self._lock:
            while self._calls and not self._engine.is_full and not self.is_paused:
                call = self._calls.popleft()
                if call.waiting:
                    self._submit(call, call.waiting.popleft())
                if call.waiting:
                    self._calls.append(call)

    def _submit(self, call: SubmittedCall, request: Request) -> None:
        def take(event: OutputEvent) -> None:
            call.put(event)
            if event.is_last:
                with self._lock:
                    call.running.discard(event.request_id)
                if self._calls:
                    self._fill()

        call.running.add(request.request_id)
        try:
            self._engine.submit(request, take)
        except JpagedError as error:
            call.running.discard(request.request_id)
            call.put(OutputEvent(request.request_id, is_last=True, error=error))
