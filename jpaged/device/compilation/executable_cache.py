"""Compiled programs cached between runs: loaded without tracing.

    FOLDER/named/<digest of everything that tracing depends on>   the digest that names the executable
    FOLDER/made/<digest of XLA's input>                           a digest of the following bytes, and the executable

JAX's own cache of compiled programs requires tracing and lowering for a lookup: 0.1 s of Python each, of 0.13 s in all.
With this cache, a server with the options of the last one loads each program in 0.03 s. If only the code was edited,
the first digest is new: the program is lowered, and found by the second digest.

Like JAX's cache it is trusted: its files are pickles. Missing or damaged files are made again; failed writes are
ignored. With JPAGED_CACHE_URL, object storage has the same files; the folder is read first, and gets copies.

`kv_fingerprint` is the digest of everything that the bytes of a KV block depend on:

    model, its dtype ── layout of a block ── the code that computed it, the device ── every weight

Servers with the same digest may exchange blocks, and a server may reuse its own blocks on disk. Other kernels, another
compiler version, or a CPU with other instructions change the last bits of keys and values. The digest then differs, so
that tokens do not depend on the source of a prefix.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import pickle
import platform
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.experimental import serialize_executable

from jpaged.config import compile_cache_url, compiler_environment_text
from jpaged.config.option import without_credentials
from jpaged.device.compilation.aot_bundle import CompileTarget, digest_of_sources
from jpaged.device.compilation.compile import ProgramSpec, told
from jpaged.device.mesh import first_device
from jpaged.device.step import Step
from jpaged.engine.executor import Geometry
from jpaged.errors import InvalidArgument
from jpaged.kernels.lora import AdaptedMatrix, EmbeddingAdapters
from jpaged.models.layers import Params

_LOG = logging.getLogger(__name__)
_KERNELS = Path(__file__).parents[2] / "kernels"
_WITHOUT_EFFECT = ("jax_compilation_cache", "jax_persistent_cache", "jax_enable_compilation_cache", "jax_debug_log")
"""Name prefixes of JAX settings that no program depends on."""
_NOT_LOADED = (
    *(OSError, EOFError, pickle.UnpicklingError, jax.errors.JaxRuntimeError),
    *(ValueError, TypeError, LookupError, AttributeError, ImportError),
)
"""Errors of loading a truncated file, or one of another version."""
_DIGEST_BYTES = 32
_DIGEST = re.compile(r"[0-9a-f]{40}")
_UNWRITABLE: set[Path] = set()
"""Folders that a warning has named."""


class ProgramBucket:
    """Compiled programs in object storage, which servers share. The first failure turns it off for the process.

    Args:
        url: such as `gs://BUCKET/jpaged`, for which fsspec's package must be installed.

    Raises:
        InvalidArgument: fsspec does not know the URL's scheme, or lacks the package for it.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        scheme = url.partition("://")[0]
        options = {"auto_mkdir": True} if scheme in ("file", "local") else {}
        self._shown = without_credentials(url)
        try:
            self._files, self._root = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError) as error:
            raise InvalidArgument("JPAGED_CACHE_URL", f"{self._shown}: {error}") from error
        self._is_off = False

    @classmethod
    def from_environment(cls) -> ProgramBucket | None:
        """Return that of JPAGED_CACHE_URL; None without it, and for several processes of one server."""
        if (url := compile_cache_url()) is None:
            return None
        if jax.process_count() > 1:
            _LOG.warning("JPAGED_CACHE_URL is not used by a server of several processes: mount a shared folder")
            return None
        return cls(url)

    def read(self, path: str) -> bytes | None:
        """Return the content of an object; None if there is none."""
        if self._is_off:
            return None
        try:
            return bytes(self._files.cat_file(f"{self._root}/{path}"))
        except FileNotFoundError:
            return None
        except Exception as error:  # each client of object storage has other types
            self._turn_off("read", error)
            return None

    def write(self, path: str, content: bytes) -> None:
        """Store an object."""
        if self._is_off:
            return
        try:
            self._files.pipe_file(f"{self._root}/{path}", content)
        except Exception as error:
            self._turn_off("write", error)

    def _turn_off(self, action: str, error: Exception) -> None:
        self._is_off = True
        _LOG.warning("cannot %s compiled programs in %s, which is not used any more: %s", action, self._shown, error)


@dataclass(frozen=True, slots=True)
class ExecutableCache:
    """The programs of one server in a folder that many servers share.

    Attributes:
        folder: created when there is something to write.
        traced_from: everything that a program depends on except its spec, as text.
        given_besides: XLA's inputs other than the lowered program, as text.
        devices: the devices that they run on.
        bucket: has the same files, for servers on other machines.
    """

    folder: Path
    traced_from: str
    given_besides: str
    devices: tuple[jax.Device, ...]
    bucket: ProgramBucket | None = None

    @classmethod
    def of(cls, folder: Path, step: Step, geometry: Geometry, params: Params) -> ExecutableCache:
        """Return the programs of a step with these sizes and parameters, which may be shapes."""
        devices = tuple(step.mesh.devices.flat)
        target = CompileTarget.of(step, geometry)
        settings = {name: value for name, value in jax.config.values.items() if not name.startswith(_WITHOUT_EFFECT)}
        given_besides = repr(
            (
                (target.jax, target.jaxlib, target.platform_version, target.device_kind, target.compiler_options),
                ([(device.platform, device.id) for device in devices], platform.machine()),
                (processor_features(), compiler_environment_text(), sorted(settings.items(), key=lambda pair: pair[0])),
            )
        )
        shapes = jax.tree_util.tree_flatten_with_path(params)[0]
        leaves = [(path, leaf.shape, leaf.dtype, leaf.format) for path, leaf in shapes]
        libraries = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in _KERNELS.glob("**/*.so")]
        traced_from = repr((target, step, geometry, leaves, sorted(libraries), given_besides))
        return cls(folder, traced_from, given_besides, devices, ProgramBucket.from_environment())

    def make(self, spec: ProgramSpec, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        """Return the cached program; if there is none, lower, compile and cache it."""
        name = _digest(self.traced_from, str(spec))
        program = self._load_named(name)
        if program is not None:
            return program
        lowered = lower()
        # The text omits arguments that the program does not use, whose shapes are checked at every call.
        arguments = [(info.shape, info.dtype) for info in jax.tree.leaves(lowered.args_info)]
        digest = _digest(self.given_besides, lowered.as_text(), repr((arguments, lowered.in_tree, lowered.out_tree)))
        program = self._load(digest)
        if program is None:
            num_from_cache = told.num_from_cache
            program = lowered.compile()
            is_loaded = told.num_from_cache > num_from_cache
            if (content := self._serialize(digest, program, is_loaded=is_loaded)) is None:
                return program
            self._write("made", digest, content)
        self._write("named", name, digest.encode())
        return program

    def _load_named(self, name: str) -> jax.stages.Compiled | None:
        """Return the program of a spec's name, which the folder or the bucket has."""
        digest = _read_text(self.folder / "named" / name)
        program = None if digest is None else self._load(digest)
        if program is not None or self.bucket is None or (found := self.bucket.read(f"named/{name}")) is None:
            return program
        digest = found.decode("ascii", "replace")
        program = self._load(digest) if _DIGEST.fullmatch(digest) else None
        if program is not None:
            _write(self.folder / "named" / name, found)
        return program

    def _load(self, digest: str) -> jax.stages.Compiled | None:
        path = self.folder / "made" / digest
        program = self._parse(digest, _read_bytes(path))
        if program is None and self.bucket is not None:
            content = self.bucket.read(f"made/{digest}")
            program = self._parse(digest, content)
            if content is not None and program is not None:
                _write(path, content)
        return program

    def _parse(self, digest: str, content: bytes | None) -> jax.stages.Compiled | None:
        if content is None:
            return None
        try:
            if hashlib.sha256(content[_DIGEST_BYTES:]).digest() != content[:_DIGEST_BYTES]:
                raise ValueError("the file is damaged")
            executable, in_tree, out_tree = pickle.loads(content[_DIGEST_BYTES:])
            program = serialize_executable.deserialize_and_load(
                executable, in_tree, out_tree, backend=self.devices[0].client, execution_devices=list(self.devices)
            )
        except _NOT_LOADED as error:
            _LOG.info("program %s is compiled again: %s", digest, error)
            return None
        told.num_from_cache += 1
        return program

    def _serialize(self, digest: str, program: jax.stages.Compiled, *, is_loaded: bool) -> bytes | None:
        """Return the content of the program's file; None if it cannot be cached.

        On CPUs a program that came from JAX's cache is not cached: it would lack functions when it is loaded.
        """
        if is_loaded and self.devices[0].platform == "cpu":
            return None
        try:
            content = pickle.dumps(serialize_executable.serialize(program))
        except (ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError, pickle.PicklingError) as error:
            _LOG.info("program %s cannot be cached: %s", digest, error)
            return None
        return hashlib.sha256(content).digest() + content

    def _write(self, part: str, name: str, content: bytes) -> None:
        _write(self.folder / part / name, content)
        if self.bucket is not None:
            self.bucket.write(f"{part}/{name}", content)


def _digest(*texts: str) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)} {text}".encode())
    return digest.hexdigest()[:40]


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None


def _read_bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically, if the folder is writable."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged.write_bytes(content)
        staged.replace(path)
    except OSError as error:
        folder = path.parent.parent
        if folder not in _UNWRITABLE:
            _UNWRITABLE.add(folder)
            _LOG.warning("cannot cache compiled programs in %s: %s", folder, error)


def processor_features() -> str:
    """Return the CPU features that Linux reports, which a CPU's programs are compiled for."""
    lines = _read_text(Path("/proc/cpuinfo")) or ""
    return next((line for line in lines.splitlines() if line.startswith(("flags", "Features"))), "")


_NUM_DIGEST_THREADS = 4


def kv_fingerprint(step: Step, params: Params) -> bytes:
    """Return the digest, 32 bytes.

    Args:
        params: as programs take them; adapters next to them do not count, because block hashes name the adapter.
    """
    device = first_device(step.mesh)
    layout = dataclasses.replace(step.layout, num_blocks=1)
    matmuls = step.linear_backend, step.activation_dtype
    kernels = (step.backend, *matmuls, step.layer_mode, dict(step.mesh.shape), step.kv_groups)
    found = hashlib.sha256(b"jpaged/kv/1\0")
    found.update(repr((step.model.config, np.dtype(step.model.dtype).name, layout, kernels)).encode())
    where = (device.platform, device.device_kind, processor_features() if device.platform == "cpu" else "")
    found.update(repr((where, jax.__version__, jaxlib.version.__version__, digest_of_sources())).encode())
    with ThreadPoolExecutor(_NUM_DIGEST_THREADS, "jpaged-identity") as threads:
        for digest in threads.map(_digest_leaf, _leaves(params)):
            found.update(digest)
    return found.digest()


def _leaves(params: Params) -> Iterator[tuple[str, Any]]:
    def without_adapters(leaf: Any) -> Any:
        return None if isinstance(leaf, EmbeddingAdapters) else leaf.base if isinstance(leaf, AdaptedMatrix) else leaf

    bare = jax.tree.map(
        without_adapters, params, is_leaf=lambda leaf: isinstance(leaf, AdaptedMatrix | EmbeddingAdapters)
    )
    for path, leaf in jax.tree_util.tree_flatten_with_path(bare)[0]:
        yield jax.tree_util.keystr(path), leaf


def _digest_leaf(named: tuple[str, Any]) -> bytes:
    """Hash the parts of a leaf on this process's devices. Hashing releases the GIL."""
    name, leaf = named
    found = hashlib.sha256(repr((name, leaf.shape, np.dtype(leaf.dtype).name)).encode())
    parts = {str(shard.index): shard.data for shard in leaf.addressable_shards}
    for index in sorted(parts):
        found.update(np.ascontiguousarray(np.asarray(parts[index])).reshape(-1).view(np.uint8).data)
    return found.digest()
