"""Compiled CPU programs on disk, shared by the workers of a run and by later runs.

    jax.jit(f)(x) ──> trace ──> lower ──> ExecutableCache ──> executable
                                            │         ▲
                                     miss: compile   hit: deserialize
                                            ▼         │
                                       .pytest_cache/programs

XLA takes most of the suite's CPU time, and every run compiles the same programs. This cache is below jax's own
persistent cache and below its compile events, so tests of those count what they count without it.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Compile = Callable[[Any, Any, Any, Any, Sequence[Any]], Any]
"""jax's function that compiles a module: backend, module, devices, options, host callbacks."""

MAX_BYTES = 2 << 30
"""Maximum size of the folder after a run; the least recently used programs are deleted first."""


class ExecutableCache:
    """Folder of serialized executables, named after a hash of all that determines them.

    XLA cannot serialize an executable that was deserialized: functions are missing from the second copy. `serialize`
    returns the bytes that are in the folder instead.
    """

    def __init__(self, folder: Path, compile_module: Compile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._compile = compile_module
        self._machine = _describe_machine()
        self._path_by_id: dict[int, Path] = {}
        """Files of executables by id: those have no weak references, so `forget` is called for every new one."""

    def compile(self, backend: Any, module: Any, devices: Any, options: Any, callbacks: Sequence[Any]) -> Any:
        """Return the executable of a module: from the folder, or compiled and stored there."""
        if backend.platform != "cpu" or callbacks or not hasattr(backend, "deserialize_executable"):
            executable = self._compile(backend, module, devices, options, callbacks)
            self.forget(executable)
            return executable
        path = self._folder / self._key(backend, module, devices, options)
        if (data := _read(path)) is not None:
            executable = backend.deserialize_executable(data, devices, options)
        else:
            executable = self._compile(backend, module, devices, options, callbacks)
            self.forget(executable)
            with contextlib.suppress(OSError):  # a full disk
                _write(path, executable.serialize())
        self._path_by_id[id(executable)] = path
        return executable

    def forget(self, executable: Any) -> Any:
        """Return an executable that is not of this folder."""
        self._path_by_id.pop(id(executable), None)
        return executable

    def serialize(self, executable: Any) -> bytes | None:
        """Return the serialized form of an executable of this folder; None for others."""
        path = self._path_by_id.get(id(executable))
        return None if path is None else _read(path)

    def _key(self, backend: Any, module: Any, devices: Any, options: Any) -> str:
        from jax._src import cache_key

        options = copy.deepcopy(options)
        # If jax has a cache of its own, this is a path in its folder, which differs from run to run.
        options.executable_build_options.debug_options.xla_gpu_per_fusion_autotune_cache_dir = ""
        digest = hashlib.sha256(self._machine)
        for part in (backend.platform_version, os.environ.get("XLA_FLAGS", ""), repr(list(devices))):
            digest.update(part.encode() + b"\0")
        cache_key._hash_serialized_compile_options(digest, options)
        digest.update(cache_key._canonicalize_ir(module, cache_key.IgnoreCallbacks.NO))
        return digest.hexdigest()


def install(folder: Path) -> None:
    """Make jax compile through a cache in a folder; no-op for a folder that cannot be written."""
    from jax._src import compiler
    from jaxlib import xla_client

    try:
        cache = ExecutableCache(folder, compiler.backend_compile_and_load)
    except OSError:
        return
    executable, client = xla_client.LoadedExecutable, xla_client.Client
    serialize, serialize_with_client = executable.serialize, client.serialize_executable
    deserialize = client.deserialize_executable
    compiler.backend_compile_and_load = cache.compile
    executable.serialize = lambda self: cache.serialize(self) or serialize(self)
    client.serialize_executable = lambda self, made: cache.serialize(made) or serialize_with_client(self, made)
    client.deserialize_executable = lambda *args, **named: cache.forget(deserialize(*args, **named))


def prune(folder: Path, max_bytes: int = MAX_BYTES) -> None:
    """Delete the least recently used programs of a folder beyond a size."""
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        by_age = sorted(((entry.stat(), entry.path) for entry in entries), key=lambda found: -found[0].st_mtime)
    num_bytes = 0
    for stat, path in by_age:
        num_bytes += stat.st_size
        if num_bytes > max_bytes:
            Path(path).unlink(missing_ok=True)


def _describe_machine() -> bytes:
    """Return what a program is compiled for: another processor may lack its instructions."""
    import jaxlib.version

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    described = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return "\n".join((jaxlib.version.__version__, *described)).encode()


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
        os.utime(path)  # `prune` deletes the oldest
    except OSError:
        return None
    return data


def _write(path: Path, data: bytes) -> None:
    """Write a file in one step: a worker may read it at the same time."""
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    os.replace(name, path)
