"""Findings about Python, required packages, and features of optional packages.

Imports only the standard library, because the checked packages may be missing or broken.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from jpaged.version import __version__

State = Literal["ok", "off", "warn", "stop"]
"""ok; off: an optional part is missing; warn: the server works with limitations; stop: the server cannot start."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of a check, and its consequence.

    Attributes:
        group: heading of the section.
        note: consequence if not ok: what does not work, and why.
        remedy: a command or an action; empty if none.
    """

    group: str
    name: str
    state: State
    value: str
    note: str = ""
    remedy: str = ""


def in_bytes(count: float) -> str:
    """Format a number of bytes for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


NAME = "jpaged"
VERSION = __version__
EXTRAS: Mapping[str, tuple[str, str]] = {
    "tpu": ("libtpu", "TPUs, and `jpaged plan` for them"),
    "cuda": ("jax-cuda13-plugin", "NVIDIA GPUs, with CUDA 13"),
    "cuda12": ("jax-cuda12-plugin", "NVIDIA GPUs, with CUDA 12"),
    "aot-gpu": ("nvidia-cuda-nvdisasm", "inspecting programs compiled for GPUs (`make aot-gpu`)"),
    "ray": ("ray", "`jpaged.ray`, a Ray Data processor, and deploy/ray"),
    "batch": ("pyarrow", "Parquet input and output of `jpaged batch`"),
    "bench": ("matplotlib", "plots of `jpaged bench`"),
    "lm-eval": ("lm_eval", "`lm_eval --model jpaged`"),
    "mooncake": ("mooncake-transfer-engine-non-cuda", "the KV connector MooncakeStoreConnector, without CUDA"),
    "tunix": ("google-tunix", "`jpaged.tunix`, a rollout engine for tunix"),
}
"""Extras for users: the package to look for, and its purpose."""
_MAIN = ("jax", "jaxlib", "grpcio", "protobuf", "numpy", "transformers", "tokenizers")
"""Requirements whose versions are always shown."""
_DEVICE_FILES: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "NVIDIA GPU": ("nvidia[0-9]*", ("jax-cuda13-plugin", "jax-cuda12-plugin"), "cuda"),
    "TPU": ("accel[0-9]*", ("libtpu",), "tpu"),
}
"""Accelerators: their files in /dev, their driver packages, and the extra that installs one."""
_DEV = Path("/dev")


def python() -> Iterator[Finding]:
    """Yield the program, Python and the system."""
    folder = Path(__file__).resolve().parents[1]
    yield Finding("program", "jpaged", "ok", f"{__version__}, in {folder}")
    yield Finding("program", "Python", "ok", f"{platform.python_version()}, {sys.executable}")
    libc = " ".join(platform.libc_ver()).strip()
    yield Finding("program", "system", "ok", ", ".join(filter(None, (platform.platform(terse=True), libc))))


def requirements() -> Iterator[Finding]:
    """Yield the main versions, and each required package that is missing or has a wrong version."""
    try:
        from packaging.requirements import Requirement
    except ImportError as error:
        yield Finding("packages", "packaging", "stop", "not installed", f"required: {error}", "pip install packaging")
        return
    try:
        wanted: list[Any] = [Requirement(text) for text in metadata.requires(NAME) or ()]
    except metadata.PackageNotFoundError:
        note = "jpaged runs from a source folder that is not installed, so its requirements are unknown"
        yield Finding("packages", "requirements", "warn", "unknown", note, "pip install .")
        return
    if (installed := metadata.version(NAME)) != __version__:
        note = f"the sources are {__version__}, but the requirements checked here are those of {installed}"
        yield Finding("packages", "jpaged", "warn", f"installed as {installed}", note, "pip install .")
    needed = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    found = {one.name: get_version(one.name) for one in needed}
    wrong = {one.name for one in needed if not one.specifier.contains(found[one.name] or "0", prereleases=True)}
    wrong |= {name for name, version in found.items() if version is None}
    for one in needed:
        if one.name in wrong:
            note = f"required: {one.name}{one.specifier}"
            value = found[one.name] or "not installed"
            yield Finding("packages", one.name, "stop", value, note, f"pip install '{one.name}{one.specifier}'")
    versions = ", ".join(f"{name} {found[name]}" for name in _MAIN if found.get(name))
    value = f"{len(needed) - len(wrong)} of {len(needed)} as required: {versions}"
    yield Finding("packages", "requirements", "stop" if wrong else "ok", value)


def unmet() -> list[Finding]:
    """Return the findings of required packages that are missing or have a wrong version."""
    return [one for one in requirements() if one.state == "stop"]


def broken(error: BaseException) -> Finding:
    """Return the finding of an installed package that cannot be imported."""
    name = getattr(error, "name", None) or type(error).__module__.partition(".")[0]
    note = f"a required package cannot be imported: {type(error).__name__}: {error}".partition("\n")[0]
    return Finding("packages", "packages" if name == "builtins" else name, "stop", "cannot be imported", note)


def is_broken(error: Exception) -> bool:
    """Return True if an error of an import is caused by a package that is missing, too old or broken."""
    if isinstance(error, ImportError | RuntimeError):  # RuntimeError: grpc's check of the version of generated code
        return True
    return type(error).__module__.startswith("google.protobuf")


def refuse(words: Sequence[str], error: BaseException) -> int:
    """Report a package that cannot be imported for a command line; return the exit code."""
    line = broken(error)
    if words[:1] == ["doctor"]:
        show([line], as_json="--json" in words)
    else:
        sys.stderr.write(f"jpaged: {line.note} (`jpaged doctor` checks what is required)\n")
    return 1


def show(found: Sequence[Finding], *, as_json: bool) -> None:
    """Print findings that stop every command, using only the standard library."""
    if as_json:
        from jpaged import json_text

        listed = [asdict(one) for one in found]
        print(json_text.dumps({"version": __version__, "ok": False, "findings": listed}, indent=2))
        return
    for one in found:
        print(f"{one.state:<5} {one.name:<24} {one.value}")
        for text in filter(None, (one.note, one.remedy and f"-> {one.remedy}")):
            print(f"        {text}")


def extras() -> Iterator[Finding]:
    """Yield the installed optional packages, and the purpose of missing ones."""
    for extra, (package, purpose) in EXTRAS.items():
        version = get_version(package)
        if version is None:
            yield Finding(
                "optional", package, "off", "not installed", f"for {purpose}", f"pip install 'jpaged[{extra}]'"
            )
        else:
            yield Finding("optional", package, "ok", f"{version}: {purpose}")


def undriven(dev: Path = _DEV) -> Iterator[Finding]:
    """Yield accelerators of this machine without an installed driver package."""
    for name, (pattern, packages, extra) in _DEVICE_FILES.items():
        files = sorted(dev.glob(pattern))
        if files and not any(get_version(package) for package in packages):
            note = f"{files[0]} exists, but no installed package supports it: it would not be used"
            yield Finding("devices", name, "warn", f"{len(files)} found", note, f"pip install 'jpaged[{extra}]'")


def get_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
