"""Where a service is in its life, and what it answers while it cannot serve.

STARTING ──loaded──> SERVING ──no step ends──> STALLED          is live    is ready
    │                  │  └────steps end again────┘             all but FAILED   SERVING alone
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
    """What a service does with requests: one that is serving takes them, and so does one that is stalled."""

    STARTING = "starting"
    SERVING = "serving"
    STALLED = "stalled"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Startup:
    """How far start-up has come: parts done, of at least one."""

    what: str
    done: int
    total: int


class ServiceState:
    """The loaded model, or why no request can run on it. Whoever loads the model says what happens.

    Args:
        config: as written; that of the model is resolved.
        model: one that is loaded already.
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
        """The process is of use, or may become so: restarting it would gain nothing."""
        return self.stage is not Stage.FAILED and self.failure is None

    @property
    def is_ready(self) -> bool:
        """Requests that come now are taken, and others are worked on."""
        return self.stage is Stage.SERVING

    def serving(self) -> LoadedModel:
        """Return the loaded model, to run requests on.

        Raises:
            Unavailable: it loads, or the service drains or has failed.
        """
        model = self.loaded()
        if self.stage is Stage.DRAINING:
            raise Unavailable("the server is draining: it takes no new requests")
        if self.stage is Stage.FAILED:
            raise Unavailable(f"the engine has died: {self.failure}")
        return model

    def loaded(self) -> LoadedModel:
        """Return the loaded model, to ask about it; raises Unavailable while it loads."""
        if self.model is None:
            startup = self.startup
            raise Unavailable(f"the server is starting: {startup.what}, {startup.done} of {startup.total}")
        return self.model

    def enter(self, stage: Stage) -> None:
        """Go on to a stage."""
        self.stage = stage

    def note_progress(self, what: str, done: int, total: int) -> None:
        """Take note of what start-up is busy with; from any thread."""
        self.startup = Startup(what, done, max(total, 1))

    def note_loaded(self, model: LoadedModel) -> None:
        """Take the model that was loaded."""
        self.model = model

    def note_failure(self, error: Exception | None = None) -> None:
        """Take note of an error, or of what the engine has died of, unless one is known."""
        if self.failure is None:
            self.failure = error or (None if self.model is None else self.model.engine.failure)
