"""Ahead-of-time compilation of every program on the list, what it cost, and a watch for programs compiled later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
from jax import monitoring
from jax.experimental.compilation_cache import compilation_cache

from jpaged.engine.buckets import BucketTable
from jpaged.engine.executor import Progress

_NUM_THREADS = 2  # tracing holds the interpreter's lock, XLA does not: two overlap the one with the other
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """One program: `backbone` for T tokens, `draw` for R rows, with alternatives or without, or a move of C blocks."""

    kind: Literal["backbone", "draw", "copy", "swap_out", "swap_in"]
    size: int
    want_top: bool = False

    def __str__(self) -> str:
        return f"{self.kind}[{self.size}{', top' if self.want_top else ''}]"


def program_specs(buckets: BucketTable, move_sizes: Sequence[int], *, has_host_blocks: bool) -> list[ProgramSpec]:
    """Every program that serves, the largest first: they take longest to compile."""
    backbones = [ProgramSpec("backbone", size) for size in reversed(buckets.tokens)]
    draws = [ProgramSpec("draw", size, want_top) for size in reversed(buckets.rows) for want_top in (False, True)]
    moves = [ProgramSpec("copy", size) for size in move_sizes]
    if has_host_blocks:
        moves += [ProgramSpec("swap_out", size) for size in move_sizes]
        moves += [ProgramSpec("swap_in", size) for size in move_sizes]
    return [*backbones, *draws, *moves]


_COMPILER_OPTIONS: Mapping[str, Mapping[str, str]] = {
    # With tiles of 16 rows every step would copy all stacked bfloat16 weights into them first.
    "TPU7x": {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"},
}


def compiler_options(device: jax.Device) -> dict[str, str] | None:
    """What XLA is told besides for programs of this device; None is nothing."""
    options = _COMPILER_OPTIONS.get(device.device_kind)
    return None if options is None else dict(options)


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A program ready to run, and the seconds that tracing, lowering and compiling (or loading) it took."""

    spec: ProgramSpec
    executable: jax.stages.Compiled
    seconds: float


def compile_all(
    lowerings: Mapping[ProgramSpec, Callable[[], jax.stages.Lowered]], progress: Progress
) -> dict[ProgramSpec, CompiledProgram]:
    """Compiles every program, two at a time. The first failure ends it."""

    def compile_one(spec: ProgramSpec) -> CompiledProgram:
        begin = time.perf_counter()
        executable = lowerings[spec]().compile()
        return CompiledProgram(spec, executable, time.perf_counter() - begin)

    done: dict[ProgramSpec, CompiledProgram] = {}
    progress("compiling", 0, len(lowerings))
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="jpaged-compile") as pool:
        futures = [pool.submit(compile_one, spec) for spec in lowerings]
        try:
            for future in as_completed(futures):
                program = future.result()
                done[program.spec] = program
                progress(f"compiled {program.spec}", len(done), len(lowerings))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return done


def set_up_compile_cache(folder: Path | None) -> None:
    """Keeps compiled programs in a folder, small and quick ones too; None turns the cache off.

    It is one cache for the process: the last call decides.
    """
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    # Whether a cache is in use is decided by a process's first compile, and remembered.
    compilation_cache.reset_cache()


class CompileWatch:
    """Counts the programs that its own watched calls compile; compiles of other threads or callers are not counted.

    jax compiles in the thread that calls, so a count for each thread tells whose a compile is.
    """

    def __init__(self) -> None:
        self.num_compiles = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Counts what this thread compiles inside."""
        begin = _thread_compiles()
        try:
            yield
        finally:
            self.num_compiles += _thread_compiles() - begin


_this_thread = threading.local()


def _thread_compiles() -> int:
    return getattr(_this_thread, "num_compiles", 0)


def _count_compile(event: str, duration_secs: float, **_: str | int) -> None:
    del duration_secs
    if event == _COMPILE_EVENT:
        _this_thread.num_compiles = _thread_compiles() + 1


monitoring.register_event_duration_secs_listener(_count_compile)
