"""A loaded model as the server sees it: an engine, an input processor, a tokenizer, and properties to report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from jpaged.config import EngineConfig
from jpaged.engine.executor import Geometry
from jpaged.engine.kv.tiers.leaving import Travels
from jpaged.engine.sequence import Sink
from jpaged.engine.stats import HistogramSnapshot
from jpaged.engine.tokenizer import Tokenizer
from jpaged.engine.watching.watch import Eyes
from jpaged.load import EngineLoad
from jpaged.service.adapters import Adapters
from jpaged.service.grammars.compiler import ServedGrammars
from jpaged.service.input_processor import InputProcessor
from jpaged.service.roles.counts import RoleCounts
from jpaged.types import LoadedAdapter, ModelInfo, Request


class EngineClient(Protocol):
    """Interface of `Engine` and `DataParallelEngine`, which document each method.

    Attributes:
        clock: the clock of deadlines, and of `RequestTimes`.
        max_num_in_flight: maximum number of accepted requests.
        eyes: inspector of the KV pools.
        travels: transfer of prefixes to and from other servers.
        keep_place: reserves a slot for a request whose prompt another server computes; returns the transfer object that
            receives its blocks.
    """

    clock: Callable[[], float]
    max_num_in_flight: int
    eyes: Eyes
    travels: Travels
    keep_place: Callable[[Request], Travels]

    @property
    def geometry(self) -> Geometry:
        """Geometry of a step; it bounds one request."""

    @property
    def failure(self) -> Exception | None:
        """Error that stopped the engine; None if none."""

    @property
    def is_full(self) -> bool:
        """True if `submit` would raise because the queue is full."""

    def submit(self, request: Request, sink: Sink) -> None: ...

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


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model. `config` is resolved; the engine (or its replicas) is not started yet.

    Attributes:
        adapters: adapters that requests may name.
        grammars: grammars of requests with structured output; None if the engine fills no masks.
        role_counts: counters of disaggregated prefill.
        checkpoint: fingerprint of the weights' files.
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
    checkpoint: str = ""
