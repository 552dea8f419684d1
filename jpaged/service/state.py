"""Lifecycle of a service, and its answers while it cannot serve.

STARTING ──loaded──> SERVING ──no step ends──> STALLED          is live      is ready
  │                  │  └────steps end again────┘               not FAILED   only SERVING
  │                  ├──drained──> DRAINING
  └──────────────────┴───failed──> FAILED
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import UTC, datetime

from jpaged.config import EngineConfig
from jpaged.errors import Unavailable
from jpaged.service.loaded_model import LoadedModel


class Stage(enum.Enum):
    """Stage of a service; SERVING and STALLED accept requests."""

    STARTING = "starting"
    SERVING = "serving"
    STALLED = "stalled"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Startup:
    """Progress of the startup: `done` of `total` parts, at least one."""

    what: str
    done: int
    total: int


class ServiceState:
    """The loaded model, or why no request can run. The code that loads the model updates it.

    Args:
        config: the options as given; the model has the resolved ones.
        model: a model that is already loaded.
    """

    def __init__(self, config: EngineConfig, model: LoadedModel | None = None) -> None:
        self.stage = Stage.STARTING if model is None else Stage.SERVING
        self.startup = Startup("starting", 0, 1)
        self.start_time = datetime.now(UTC)
        self.model = model
        self.failure: Exception | None = None
        self._config = config

    @property
    def config(self) -> EngineConfig:
        """The options, resolved once the model is loaded."""
        return self._config if self.model is None else self.model.config

    @property
    def is_live(self) -> bool:
        """True unless the process has failed; restarting a live process gains nothing."""
        return self.stage is not Stage.FAILED and self.failure is None

    @property
    def is_ready(self) -> bool:
        """True if new requests are accepted and make progress."""
        return self.stage is Stage.SERVING

    def serving(self) -> LoadedModel:
        """Return the loaded model, to run requests on.

        Raises:
            Unavailable: the model is loading, or the service drains or has failed.
        """
        model = self.loaded()
        if self.stage is Stage.DRAINING:
            raise Unavailable("the server is draining: it takes no new requests")
        if self.stage is Stage.FAILED:
            raise Unavailable(f"the engine has died: {self.failure}")
        return model

    def loaded(self) -> LoadedModel:
        """Return the loaded model for queries; raise Unavailable while it loads."""
        if self.model is None:
            startup = self.startup
            raise Unavailable(f"the server is starting: {startup.what}, {startup.done} of {startup.total}")
        return self.model

    def enter(self, stage: Stage) -> None:
        """Enter a stage."""
        self.stage = stage

    def note_progress(self, what: str, done: int, total: int) -> None:
        """Record the progress of the startup. Thread-safe."""
        self.startup = Startup(what, done, max(total, 1))

    def note_loaded(self, model: LoadedModel) -> None:
        """Set the loaded model."""
        self.model = model

    def note_failure(self, error: Exception | None = None) -> None:
        """Record the given error or the engine's failure, unless one is recorded already."""
        if self.failure is None:
            self.failure = error or (None if self.model is None else self.model.engine.failure)
