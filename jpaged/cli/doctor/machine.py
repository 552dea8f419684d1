"""Requirements of a server from this machine: cache, open files, ports, files of options, other processes."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from jpaged.cli.doctor.finding import Finding, in_bytes
from jpaged.cli.options import flag_of
from jpaged.config import EngineConfig, compile_cache_dir, explain_environment, iter_options
from jpaged.errors import InvalidArgument

_MAX_COUNTED = 20_000
"""Maximum counted files of a cache: this many take 0.2 s."""
_LEAST_FREE_BYTES = 1 << 30


def cache(folder: Path | None) -> Iterator[Finding]:
    """Yield the state of the cache of compiled programs: its size, and if it is writable."""
    name, remedy = "compiled programs", "set JPAGED_CACHE_DIR to a writable folder"
    if folder is None:
        note = "JPAGED_CACHE_DIR is empty: every start compiles everything again"
        yield Finding("machine", name, "off", "disabled", note, remedy)
        return
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        note = f"{there} is not writable: every start compiles everything again"
        yield Finding("machine", name, "warn", str(folder), note, remedy)
        return
    sizes = [_size_of(path) for path in islice(folder.rglob("*"), _MAX_COUNTED)] if folder.is_dir() else []
    free = shutil.disk_usage(there).free
    more = " at least" if len(sizes) == _MAX_COUNTED else ""
    value = f"{folder}: {in_bytes(sum(sizes))}{more} in use, {in_bytes(free)} free"
    if free < _LEAST_FREE_BYTES:
        yield Finding("machine", name, "warn", value, "the disk is nearly full: programs may not be cached", remedy)
    else:
        yield Finding("machine", name, "ok", value)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # another process has removed it
        return 0


def limits(max_connections: int) -> Iterator[Finding]:
    """Yield the processors and the system's limits."""
    yield Finding("machine", "processors", "ok", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{_limit(soft)}, at most {_limit(hard)}"
    if soft != resource.RLIM_INFINITY and soft // 2 < max_connections:
        note = f"connections are limited to half of them, below max_connections ({max_connections})"
        yield Finding("machine", "open files", "warn", value, note, f"ulimit -n {2 * max_connections}")
    else:
        yield Finding("machine", "open files", "ok", value)
    for name, number in (
        ("address space", resource.RLIMIT_AS),
        ("locked memory", resource.RLIMIT_MEMLOCK),
        ("processes", resource.RLIMIT_NPROC),
        ("stack", resource.RLIMIT_STACK),
    ):
        soft, _ = resource.getrlimit(number)
        is_tight = number == resource.RLIMIT_AS and soft != resource.RLIM_INFINITY
        note = "XLA reserves more address space than it uses: loading may fail" if is_tight else ""
        remedy = "ulimit -v unlimited" if is_tight else ""
        shown = _limit(soft) if number == resource.RLIMIT_NPROC else _limit_bytes(soft)
        yield Finding("machine", name, "warn" if is_tight else "ok", shown, note, remedy)


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else str(value)


def _limit_bytes(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else in_bytes(value)


def ports(config: EngineConfig) -> Iterator[Finding]:
    """Yield if the ports of a server with these options are free."""
    values = {name: getattr(getattr(config, section), name) for name, section, _ in iter_options()}
    for name, _, spec in iter_options():
        host = values.get(f"{name.removesuffix('port')}host", config.server.host)
        number = values[name]
        if not name.endswith("port") or spec.metadata["high"] != 65535 or number is None:
            continue
        if number == 0:
            yield Finding("machine", name, "ok", "any free port")
        elif problem := _why_not_free(host, number):
            yield Finding("machine", name, "stop", f"{host}:{number}", problem, f"{flag_of(name)} 0 picks a free one")
        else:
            yield Finding("machine", name, "ok", f"{host}:{number} is free")


def _why_not_free(host: str, port: int) -> str:
    """Return the system's error for a socket at an address; empty if it can be opened."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        return str(error.strerror or error)
    return ""


def files(config: EngineConfig) -> Iterator[Finding]:
    """Yield if the files and folders of the options exist and can be read."""
    for name, section, spec in iter_options():
        kind, value = spec.metadata["path"], getattr(getattr(config, section), name)
        if not kind or value is None:
            continue
        path = Path(value)
        if problem := _why_not_usable(path, kind):
            yield Finding("machine", name, "stop", str(path), problem, f"give another {flag_of(name)}")
        else:
            yield Finding("machine", name, "ok", str(path))


def _why_not_usable(path: Path, kind: str) -> str:
    """Return why a path cannot be used for an option of this kind; empty if it can."""
    if kind == "new file" and path.exists():
        return "" if path.is_file() and os.access(path, os.W_OK) else "not writable"
    if kind.startswith("new"):
        there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        return "" if there.is_dir() and os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable"
    if not (path.is_file() if kind == "file" else path.is_dir()):
        return f"there is no such {kind}"
    return "" if os.access(path, os.R_OK) else "not readable"


def processes(config: EngineConfig) -> Iterator[Finding]:
    """Yield if this would be one of several processes."""
    try:
        found = config.multihost()
    except InvalidArgument as error:
        yield Finding("machine", "multiple processes", "stop", "invalid", str(error), "--num-processes 1")
        return
    if found is not None:
        value = f"{found.process_id} of {found.num_processes}, process 0 at {found.coordinator} ({found.source})"
        yield Finding("machine", "multiple processes", "ok", value)


def environment() -> Iterator[Finding]:
    """Yield the variables that jpaged reads, and set variables of libraries."""
    for name, value, text in explain_environment():
        if value is None:
            yield Finding("environment", name, "ok", "not set", text)
        else:
            yield Finding("environment", name, "ok", value or "(empty)", text)


def findings(config: EngineConfig) -> Iterator[Finding]:
    """Yield all findings about this machine."""
    yield from limits(config.server.max_connections)
    yield from cache(compile_cache_dir())
    yield from ports(config)
    yield from files(config)
    yield from processes(config)
