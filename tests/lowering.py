"""A context of MLIR for many lowerings: the quick suite lowers thousands of small programs.

jax makes a context for each program and loads all its dialects into it, which takes four times the processor time of
lowering a small program, and a fifth of compiling it.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

_NUM_LOWERINGS = 32
"""Programs that share a context, which keeps their types and constants until all of them are gone."""


def share_contexts() -> None:
    """Let each thread lower programs in a context that it has made before. Do nothing if jax has changed."""
    from jax._src.interpreters import mlir

    make, init = getattr(mlir, "make_ir_context", None), mlir.ModuleContext.__init__
    if make is None:
        return
    contexts = _Contexts(make)

    @functools.wraps(init)
    def init_in_context(self: Any, /, *, context: Any = None, **fields: Any) -> None:
        init(self, context=contexts.next_one() if context is None else context, **fields)

    mlir.ModuleContext.__init__ = init_in_context  # type: ignore[method-assign, assignment]


class _Contexts(threading.local):
    """The context of each thread."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._context: Any = None
        self._num_left = 0

    def next_one(self) -> Any:
        """Return the context of this thread, or a new one if enough programs were lowered in it."""
        if not self._num_left:
            self._context, self._num_left = self._make(), _NUM_LOWERINGS
        self._num_left -= 1
        return self._context
