"""Serving programs that are compiled when they are first called: a quick test uses a few of an executor's programs.

The long tests compile every program at the start, as a server does, and so do the quick tests of compilation itself.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import pytest

from jpaged.device import step_costs
from jpaged.device.compilation.compile import ProgramSpec
from jpaged.device.compilation.program_registry import ProgramSource, ProgramStore

Context = AbstractContextManager[Any]
_QUICK_FLAG = "--xla_backend_optimization_level=0"
"""What tests/conftest.py sets for the quick tests alone."""


class OnDemandProgram:
    """Stand-in for a compiled program that compiles it on the first call; has no memory report."""

    def __init__(self, make: Callable[[], jax.stages.Compiled], during: Callable[[], Context]) -> None:
        self._make = make
        self._during = during
        self._lock = threading.Lock()
        self._executable: jax.stages.Compiled | None = None

    def __call__(self, *args: Any) -> Any:
        return self.executable(*args)

    @property
    def executable(self) -> jax.stages.Compiled:
        """The program, compiled on a thread of its own: on the caller's it would count as compiled while serving."""
        with self._lock:
            if self._executable is None:
                thread = threading.Thread(target=self._compile)
                thread.start()
                thread.join()
            if self._executable is None:
                raise RuntimeError("the program failed to compile")
            return self._executable

    def memory_analysis(self) -> None:
        """Return no report, which counts as no memory."""

    def _compile(self) -> None:
        with self._during():
            self._executable = self._make()


@contextmanager
def programs_on_demand(during: Callable[[], Context] = nullcontext) -> Iterator[None]:
    """Let executors that are created and warmed up in this context compile on demand, if the quick tests run.

    Args:
        during: context in which each program is traced and compiled.
    """
    if _QUICK_FLAG not in os.environ.get("XLA_FLAGS", ""):
        yield
        return
    init, measure = ProgramStore.__init__, step_costs._measure_seconds

    def on_demand(source: ProgramSource) -> ProgramSource:
        make: Any = functools.partial(OnDemandProgram, source.make, during)
        return source if source.is_saved else ProgramSource(make)

    def init_on_demand(
        store: ProgramStore, sources: Mapping[ProgramSpec, ProgramSource], *args: Any, **options: Any
    ) -> None:
        init(store, {spec: on_demand(source) for spec, source in sources.items()}, *args, **options)

    def measure_compiled(act: Callable[[], object]) -> float:
        act()
        return measure(act)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgramStore, "__init__", init_on_demand)
        patch.setattr(step_costs, "_measure_seconds", measure_compiled)
        yield
