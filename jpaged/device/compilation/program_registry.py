"""The compiled programs of a server, their compile times, and the compilation of the remaining ones in the background.

    compile(specs)     waits for these                         a failure ends it
    compile_rest()     returns at once; the others follow      a failure is logged; steps are padded to ready programs

The most needed programs come first. `least_programs`, one of each kind, runs any step: the largest forward, the largest
sample with top log-probabilities, and the smallest move of each kind, which large moves run repeatedly. Then follow the
shapes of a single decoding request, of a full decoding batch, and everything between.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from typing import Literal

import jax

from jpaged.device.compilation.compile import ProgramSpec, told
from jpaged.engine.executor import COMPILER_THREAD, Detail, Progress
from jpaged.errors import InternalError

_LOG = logging.getLogger(__name__)
NUM_THREADS = max(2, min(8, (os.cpu_count() or 2) // 2))
"""Tracing holds the GIL, XLA does not: with two threads the two overlap, more compile in parallel."""
NUM_BACKGROUND_THREADS = max(1, min(4, (os.cpu_count() or 2) // 4))
"""Threads that compile while requests run, which need most processors themselves."""
_RELEASE_S = 1.0
_POLL_S = 0.01
_BACKGROUND_NICENESS = 5
"""A thread of this niceness gets a quarter of a processor that it shares with a thread of niceness 0."""

Origin = Literal["compiled", "cache", "saved"]
"""Where a program came from: the compiler, the cache on disk, or a folder of saved programs."""


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A program ready to run, and the seconds that tracing, lowering and compiling (or loading) it took."""

    spec: ProgramSpec
    executable: jax.stages.Compiled
    seconds: float
    origin: Origin = "compiled"


@dataclass(frozen=True, slots=True)
class ProgramSource:
    """Makes one program: by compiling it, or by loading a saved one."""

    make: Callable[[], jax.stages.Compiled]
    is_saved: bool = False

    @classmethod
    def of(cls, lowering: Callable[[], jax.stages.Lowered]) -> ProgramSource:
        """Return a source that traces, lowers and compiles."""
        return cls(lambda: lowering().compile())


class ProgramStore:
    """Makes every program of a list on its own threads, and records which are ready.

    Attributes:
        specs: the whole list, most needed first.
        ready: programs that can run; grows.
        num_failed: programs whose background compilation failed.

    Args:
        sources: of every program, most needed first.
        on_ready: called after each program is ready, one call at a time, on the thread that made it.
        num_threads: programs that are made concurrently; in the background they are at most `NUM_BACKGROUND_THREADS`.
    """

    def __init__(
        self,
        sources: Mapping[ProgramSpec, ProgramSource],
        on_ready: Callable[[], None] = lambda: None,
        num_threads: int = NUM_THREADS,
    ) -> None:
        self._sources = dict(sources)
        self.specs = tuple(sources)
        self._on_ready = on_ready
        self._num_threads = num_threads
        self._landing = threading.Lock()
        self.ready: dict[ProgramSpec, CompiledProgram] = {}
        self._threads: list[ThreadPoolExecutor] = []
        self._futures: list[Future[None]] = []
        self.num_failed = 0

    def sizes(self, kind: str, *, detail: Detail = Detail.TOKENS) -> tuple[int, ...]:
        """Return the sizes of the ready programs of a kind, ascending."""
        found = {spec.size for spec in tuple(self.ready) if spec.kind == kind and spec.detail == detail}
        return tuple(sorted(found))

    def find(self, spec: ProgramSpec) -> jax.stages.Compiled:
        """Return the executable of a program.

        Raises:
            InternalError: it is not ready.
        """
        program = self.ready.get(spec)
        if program is None:
            ready = self.ready
            known = ", ".join(str(one) for one in self.specs if one in ready) or "none: warm_up has not run"
            raise InternalError(f"program {spec} is not compiled; compiled are {known}")
        return program.executable

    def wait(self, spec: ProgramSpec) -> jax.stages.Compiled:
        """Return the executable of a program, as soon as the background has made it.

        Raises:
            InternalError: it failed, or is not in the list.
        """
        while spec not in self.ready and not all(future.done() for future in tuple(self._futures)):
            time.sleep(_POLL_S)
        return self.find(spec)

    def compile(self, specs: Collection[ProgramSpec], progress: Progress) -> None:
        """Make these programs, a few at a time, and return when all are ready. The first failure ends it."""
        progress("compiling", 0, len(specs))
        threads = ThreadPoolExecutor(self._num_threads, COMPILER_THREAD)
        futures = self._submit(threads, specs, lambda num_ready: progress("compiled", num_ready, len(specs)))
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            self.close()
            raise

    def compile_rest(self, progress: Progress) -> None:
        """Make all other programs on threads of low priority, and report progress when the last one is done."""
        rest = [spec for spec in self._sources if spec not in self.ready]
        begin = time.perf_counter()

        def report(num_ready: int) -> None:
            if num_ready + self.num_failed == len(self.specs):
                progress(self.summary(time.perf_counter() - begin), 1, 1)

        if not rest:
            report(len(self.ready))
        num_threads = min(self._num_threads, NUM_BACKGROUND_THREADS)
        threads = ThreadPoolExecutor(num_threads, f"{COMPILER_THREAD}-background", initializer=_lower_priority)
        for future in self._submit(threads, rest, report):
            future.add_done_callback(lambda done: self._note_failure(done, report))

    def summary(self, background_s: float) -> str:
        """Return a text with the number of programs and their origins."""
        origins = [program.origin for program in self.ready.values()]
        counts = [f"{origins.count(origin)} {name}" for origin, name in _ORIGIN_NAMES.items() if origin in origins]
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        after = f", the last {background_s:.1f} s after the first step could run" if background_s >= 0.1 else ""
        return f"{len(origins)} programs: {', '.join(counts)}{failed}{after}"

    def close(self) -> None:
        """Start no more programs; programs still being made are dropped."""
        for threads in self._threads:
            threads.shutdown(wait=False, cancel_futures=True)
        self._sources = {}

    def release(self) -> None:
        """Close, free all programs, and wait for those still being made, for up to `_RELEASE_S`.

        XLA cannot interrupt a compilation, which may take a minute on a busy machine. A longer one ends on its thread,
        and its program is dropped. The thread is no daemon thread: the process waits for it at its end, because XLA
        would use objects that the end destroys.
        """
        with self._landing:
            self.close()
            self.ready = {}
        # One that a thread has taken from the queue but not begun is neither cancelled nor running yet.
        pending = [future for future in self._futures if not future.done()]
        self._futures = []
        if not wait(pending, _RELEASE_S).not_done:
            for threads in self._threads:
                threads.shutdown(wait=True)

    def _submit(
        self, threads: ThreadPoolExecutor, specs: Collection[ProgramSpec], report: Callable[[int], None]
    ) -> list[Future[None]]:
        self._threads.append(threads)
        futures = [threads.submit(self._make, spec, self._sources[spec], report) for spec in specs]
        self._futures += futures
        threads.shutdown(wait=False)  # its threads end with the last program
        return futures

    def _make(self, spec: ProgramSpec, source: ProgramSource, report: Callable[[int], None]) -> None:
        with self._landing:
            if not self._sources:
                return  # closed after a thread took it from the queue
        begin, num_cached = time.perf_counter(), told.num_from_cache
        executable = source.make()
        is_cached = told.num_from_cache > num_cached
        origin: Origin = "saved" if source.is_saved else "cache" if is_cached else "compiled"
        program = CompiledProgram(spec, executable, time.perf_counter() - begin, origin)
        with self._landing:
            if not self._sources:
                return  # closed in between
            self.ready = {**self.ready, spec: program}
            self._on_ready()
            report(len(self.ready))

    def _note_failure(self, future: Future[None], report: Callable[[int], None]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is None:
            return
        with self._landing:
            if not self._sources:
                return  # closed in between
            self.num_failed += 1
            _LOG.error("a program failed to compile, so steps are padded to larger ones: %s", error)
            report(len(self.ready))


def _lower_priority() -> None:
    """Give the calling thread the priority of background work, on Linux, where threads have their own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            thread = threading.get_native_id()
            usual = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, max(usual, _BACKGROUND_NICENESS))


_ORIGIN_NAMES: Mapping[Origin, str] = {
    "compiled": "compiled",
    "cache": "from the cache",
    "saved": "from the folder of saved programs",
}
