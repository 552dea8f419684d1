"""What a service asks of a role that is not "both"."""

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
    """A prompt that another server asks to be computed for it.

    Attributes:
        cache_tenant: whose cached prefixes it may use, and leaves.
        adapter_digest: of the adapter that it means by its name.
        num_known: leading blocks that are there already.
    """

    cache_tenant: str
    adapter_digest: bytes
    num_known: int


class Generation(Protocol):
    """A call that was let in, as a role sees it: `jpaged.service.service.Generation`."""

    @property
    def engine_id(self) -> str:
        """The name that the engine knows it by."""

    @property
    def stream(self) -> OutputStream:
        """Who is told of it."""

    def end(self, finish: SequenceFinish | None = None, error: JpagedError | None = None) -> None:
        """End the stream for its reader."""

    def goes_on_by(self, task: asyncio.Task[Any] | None, *, is_done: bool = False) -> None:
        """Have a task make the engine's request of it; None ends that."""


class ServerRole(Protocol):
    """Begins requests in another way than by giving them to the engine. On the service's event loop."""

    async def prepare(self, model: LoadedModel) -> None:
        """Get ready, before the first request; raises Unsupported where the model cannot be served so."""

    def begin(self, model: LoadedModel, request: Request, generation: Generation, asked: AskedPrefill | None) -> None:
        """Take a request that was let in; raises what `Engine.submit` does, and InvalidArgument for what is refused."""

    def hurry(self, model: LoadedModel, generation: Generation) -> bool:
        """Give the engine what it has not been given of a request; False where there is nothing."""

    def end(self, model: LoadedModel, generation: Generation) -> None:
        """Note that nobody reads a request any more, however it came to that."""
