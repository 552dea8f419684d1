"""Prompts that are computed on one engine and go on on another: their blocks as bytes, asked for by any thread.

    computes     submit_held ── first event: hold ── stage ── view ── sent ── let_go
    goes on      keep_place ── keys ── expect ── view ── arrived ── submit ── first event: let_go

`jpaged.engine.kv.tiers.travelling` knows what is held, and until when; every question goes to the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from jpaged.engine.executor import Executor, Geometry, HostBlocks
from jpaged.engine.handover.keys import PromptKeys, prompt_keys
from jpaged.engine.kv.blocks import Key
from jpaged.engine.kv.prefixes import Prefixes
from jpaged.engine.kv.tiers.travelling import Portion, Travelling
from jpaged.engine.loop import EngineLoop
from jpaged.engine.sequence import Sink
from jpaged.types import OutputEvent, Request

_T = TypeVar("_T")


class Handover:
    """One engine's. Every `name` is the id of a request in flight."""

    def __init__(
        self,
        host_blocks: HostBlocks,
        geometry: Geometry,
        prefixes: Prefixes,
        travelling: Travelling,
        loop: EngineLoop,
        ask: Callable[[Callable[[], None]], None],
        submit: Callable[[Request, Sink], None],
    ) -> None:
        self.host_blocks = host_blocks
        self._geometry = geometry
        self._prefixes = prefixes
        self._travelling = travelling
        self._loop = loop
        self._ask_thread = ask
        self._submit = submit

    @classmethod
    def of(
        cls,
        executor: Executor[Any, Any],
        loop: EngineLoop,
        ask: Callable[[Callable[[], None]], None],
        submit: Callable[[Request, Sink], None],
    ) -> Handover | None:
        """That of an engine; None where blocks are no bytes of the host's, or nothing is found again."""
        blocks, memory = executor.host_blocks, loop.memory
        if blocks is None or memory.prefixes is None or memory.travelling is None:
            return None
        return cls(blocks, executor.geometry, memory.prefixes, memory.travelling, loop, ask, submit)

    # --- where a prompt is computed ---------------------------------------------------------------------------------

    def submit_held(self, request: Request, sink: Sink, num_known: int, num_staged: int) -> Future[Portion]:
        """Takes a request whose prompt's blocks are held from its first token on, until `let_go`.

        Args:
            num_known: leading blocks that need not be held.
            num_staged: blocks that are brought to the host at once.

        Returns:
            the first of them, as `stage` gives the others; none where the prompt cannot be held.

        Raises:
            what `Engine.submit` does.
        """
        first: Future[Portion] = Future()
        first.set_running_or_notify_cancel()
        has_begun = False

        def pass_on(event: OutputEvent) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                group, name = self._loop.groups.get(request.request_id), request.request_id
                if group is not None and event.error is None and event.token_ids:
                    self._travelling.hold(name, group, num_known, self._loop.groups.values())
                self._travelling.stage(name, num_staged, first.set_result)
            sink(event)

        self._submit(request, pass_on)
        return first

    def stage(self, name: str, num_blocks: int) -> Future[Portion]:
        """Has up to so many blocks brought to the host, where their bytes may be read: see `Travelling.stage`."""
        return self._asked(lambda then: self._travelling.stage(name, num_blocks, then))

    def sent(self, name: str, portion: Portion) -> None:
        """Gives staged blocks back, whose bytes nobody reads any more."""
        self._ask_thread(lambda: self._travelling.sent(name, portion))

    # --- where it goes on -------------------------------------------------------------------------------------------

    def keep_place(self, request_id: str) -> None:
        """Keeps a place for a request that is submitted later, until it is, or is dropped; raises as `submit` does."""
        self._loop.in_flight.expect(request_id, self._loop.stats.seconds_per_request)

    def keys(self, request: Request) -> PromptKeys:
        """Look for the blocks of a prompt; on a thread where it is long: a block takes 3 us."""
        return prompt_keys(request, self._prefixes, self._geometry)

    def expect(self, name: str, keys: PromptKeys) -> Future[dict[Key, int]]:
        """Blocks of the host that may be written, as far as there is room: see `Travelling.expect`."""
        return self._asked(lambda then: self._travelling.expect(name, keys.known, keys.wanted, then))

    def arrived(self, name: str, homes: dict[Key, int]) -> None:
        """Makes blocks known that were written: see `Travelling.arrived`."""
        self._ask_thread(lambda: self._travelling.arrived(name, homes))

    # --- both -------------------------------------------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        """Token slots in a block."""
        return self._geometry.block_size

    def let_go(self, name: str) -> None:
        """Ends a journey, wherever it is; a second time nothing happens."""
        self._ask_thread(lambda: self._travelling.let_go(name))

    def let_go_now(self, name: str) -> None:
        """Ends a journey, on the engine's thread."""
        self._travelling.let_go(name)

    def _asked(self, question: Callable[[Callable[[_T], None]], None]) -> Future[_T]:
        """What the engine's thread answers, when it does; never, where that ends before."""
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()
        self._ask_thread(lambda: question(future.set_result))
        return future
