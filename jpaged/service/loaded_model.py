"""What the server needs of a loaded model: an engine, an input processor, a tokenizer, and facts to report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from jpaged.config import EngineConfig
from jpaged.engine.executor import Geometry
from jpaged.engine.kv.tiers.travels import Travels
from jpaged.engine.sequence import Sink
from jpaged.engine.stats import HistogramSnapshot
from jpaged.engine.tokenizer import Tokenizer
from jpaged.engine.watching.eyes import Eyes
from jpaged.load import EngineLoad
from jpaged.service.adapters import Adapters
from jpaged.service.grammars.compiler import ServedGrammars
from jpaged.service.input_processor import InputProcessor
from jpaged.service.roles.counts import RoleCounts
from jpaged.types import LoadedAdapter, ModelInfo, Request


class EngineClient(Protocol):
    """Runs requests to their end: an `Engine` or a `DataParallelEngine`, which say what each verb does and raises.

    Attributes:
        clock: the clock of deadlines, and of `RequestTimes`.
        max_num_in_flight: requests that are accepted at one time.
        eyes: what may be asked about its pools.
        travels: what may be asked of prefixes that come from other servers, and go there.
        keep_place: keeps a place for a request whose prompt is computed elsewhere; where its blocks have to arrive.
    """

    clock: Callable[[], float]
    max_num_in_flight: int
    eyes: Eyes
    travels: Travels
    keep_place: Callable[[Request], Travels]

    @property
    def geometry(self) -> Geometry:
        """The geometry of a step: what one request can have."""

    @property
    def failure(self) -> Exception | None:
        """The error that ended it; None while there is none."""

    @property
    def is_full(self) -> bool:
        """`submit` would refuse for want of a place in the queue."""

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
        """The load of each copy of the model; `load` is of all."""

    def histogram(self, name: str) -> HistogramSnapshot: ...

    def num_ended_by_reason(self) -> dict[str, int]: ...

    def start(self) -> None: ...

    def step(self) -> bool:
        """Runs one iteration on the caller's thread, instead of `start`; False when there was nothing to do."""

    def check(self) -> None: ...

    def drain(self, timeout_s: float) -> bool: ...

    def fail(self, error: Exception, *, hangs: bool = False) -> None:
        """Ends it with this error; where it hangs, `stop` does not wait for what may never return."""

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BackendFacts:
    """Where the model runs: all copies of it. `attention` names the implementation that was chosen."""

    platform: str
    device_kind: str
    num_devices: int
    attention: str
    jax_version: str


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is loaded. `config` is resolved; the engine (or its replicas) is not started yet.

    Attributes:
        adapters: those that requests may name.
        grammars: those that requests ask for; None where the engine fills no masks.
        role_counts: what a server has done for others, or has had done.
        checkpoint: a fingerprint of the files that its weights were read from.
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
