"""Interface of a role other than "both", as the service uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio

    from jpaged.errors import JpagedError
    from jpaged.service.loaded_model import LoadedModel
    from jpaged.service.streams import OutputStream
    from jpaged.types import Request, SequenceFinish


@dataclass(frozen=True, slots=True)
class AskedPrefill:
    """A prefill that another server requests.

    Attributes:
        cache_tenant: tenant whose cached prefixes the prompt may use and extend.
        adapter_digest: digest of the adapter that the caller expects under its name.
        num_known: leading blocks that the caller already has.
    """

    cache_tenant: str
    adapter_digest: bytes
    num_known: int


class Generation(Protocol):
    """An admitted call as a role sees it: `jpaged.service.service.Generation`."""

    @property
    def engine_id(self) -> str:
        """Request id inside the engine."""

    @property
    def stream(self) -> OutputStream:
        """Stream of the request's events."""

    def end(self, finish: SequenceFinish | None = None, error: JpagedError | None = None) -> None:
        """End the stream for its reader."""

    def goes_on_by(self, task: asyncio.Task[Any] | None, *, is_done: bool = False) -> None:
        """Attach the task that prepares the engine's request; None cancels it."""


class ServerRole(Protocol):
    """Submits requests to the engine in a role's own way. Runs on the service's event loop."""

    async def prepare(self, model: LoadedModel) -> None:
        """Prepare before the first request; raise Unsupported if the model cannot be served in this role."""

    def begin(self, model: LoadedModel, request: Request, generation: Generation, asked: AskedPrefill | None) -> None:
        """Submit an admitted request; raise as `Engine.submit` does, and InvalidArgument for what the role refuses."""

    def hurry(self, model: LoadedModel, generation: Generation) -> bool:
        """Submit the rest of a request to the engine now; return False if nothing is left to submit."""

    def end(self, model: LoadedModel, generation: Generation) -> None:
        """Handle the end of a call, for any reason: release what the role holds for it."""
