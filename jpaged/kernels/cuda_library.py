"""Compiles the CUDA kernels to a shared library, independent of Python, and loads it through jax.ffi.

nvcc is part of jax's CUDA packages (`jax[cuda13]`), and requires a C++ compiler. It needs no GPU:

    python -m jpaged.kernels.cuda_library

Also the checks whether a GPU has kernels, and whether this jax has Pallas Triton.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

from jpaged.kernels.cpu import build
from jpaged.kernels.cpu.build import BuildError
from jpaged.kernels.cpu.library import OTHER_SOURCES, read_symbol

_MIN_CAPABILITY = (8, 0)


def unsupported_gpu_reason(device: jax.Device) -> str | None:
    """Return why a device is no NVIDIA GPU since Ampere, or None."""
    if device.platform != "gpu":
        return f"runs on NVIDIA GPUs since Ampere (sm_80); this is a {device.platform}"
    capability = str(device.compute_capability)
    numbers = capability.split(".")
    if not all(number.isdigit() for number in numbers):
        return f"runs on NVIDIA GPUs; this is {device.device_kind}, {capability}"
    if tuple(map(int, numbers)) < _MIN_CAPABILITY:
        return f"runs on Ampere (sm_80) and later; this is {device.device_kind}, sm_{capability.replace('.', '')}"
    return None


_TRITON = "jax.experimental.pallas.triton"


@functools.cache
def has_triton() -> bool:
    """Return True if this jax has the compiler; jax has announced its removal."""
    return importlib.util.find_spec(_TRITON) is not None


SHARED = build.KERNELS / "cuda"
"""The folder of the header that all kernels share, and of the library."""
LIBRARY = SHARED / "libjpaged_cuda.so"
TARGET, PRODUCT_TARGET = "jpaged_cuda_attend", "jpaged_cuda_multiply"
"""The functions' names in the library and in XLA's table: attention, and products of groups of rows."""
SOURCES = {
    TARGET: build.KERNELS / "paged_attention" / "cuda" / "kernel.cu",
    PRODUCT_TARGET: build.KERNELS / "matmul" / "cuda" / "kernel.cu",
}
"""The source of each function."""
ARCHITECTURES = ("80", "90", "100", "120")
"""Compute capabilities with their own code. 8.6 and 8.9 run that of 8.0; others compile its PTX when it is loaded."""
DIGEST, BUILT_FOR = "jpaged_cuda_sources", "jpaged_cuda_architectures"
"""The library's symbols with the digest of the sources, and its architectures separated by spaces."""
_FLAGS = ("-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", "-cudart", "static", "--threads", "0")
_TIMEOUT_S = 1800


def find_nvcc(wanted: str | None = None) -> str:
    """Return the path of nvcc: the given one, that of NVIDIA's Python packages, or an installed one.

    Raises:
        BuildError: there is none.
    """
    spec = importlib.util.find_spec("nvidia")
    packages = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [str(path) for package in packages for path in sorted(Path(package).glob("*/bin/nvcc"))]
    found += ["nvcc", "/usr/local/cuda/bin/nvcc"]
    for name in [wanted] if wanted else found:
        if (path := shutil.which(name)) is not None:
            return path
    raise BuildError(f"nvcc was not found ({', '.join(found)}); jax[cuda13] includes it")


def compile_library(
    library: Path, nvcc: str, headers: Path, architectures: Sequence[str] = ARCHITECTURES, flags: Sequence[str] = ()
) -> str:
    """Compile the library, with PTX of the first architecture, and write it atomically.

    Returns:
        the compiler's output.

    Raises:
        BuildError: compilation failed; has the compiler's output.
    """
    codes = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in architectures]
    codes.append(f"-gencode=arch=compute_{architectures[0]},code=compute_{architectures[0]}")
    staged = library.with_name(f".{os.getpid()}.{library.name}")
    includes = ("-I", str(build.KERNELS / build.SHARED), "-I", str(SHARED), "-isystem", str(headers))
    symbols = {DIGEST: build.digest_sources(list_sources()), BUILT_FOR: " ".join(architectures)}
    with tempfile.TemporaryDirectory() as folder:
        described = Path(folder) / "described.cc"
        described.write_text("".join(build.define_symbol(*symbol) for symbol in symbols.items()))
        command = [
            nvcc,
            *_FLAGS,
            *codes,
            *flags,
            *includes,
            *map(str, (*SOURCES.values(), described)),
            "-o",
            str(staged),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
            if done.returncode:
                raise BuildError(f"exit status {done.returncode} of {' '.join(command)}\n{done.stdout}{done.stderr}")
            staged.replace(library)
        except subprocess.TimeoutExpired:
            raise BuildError(f"nvcc took more than {_TIMEOUT_S} s") from None
        finally:
            staged.unlink(missing_ok=True)
    return done.stdout + done.stderr


def list_sources() -> list[Path]:
    """Return the files that `compile_library` compiles or includes."""
    return [*SOURCES.values(), *SHARED.glob("*.h"), build.KERNELS / build.SHARED / "numbers.h"]


@functools.cache
def missing_reason() -> str | None:
    """Register the library's functions with XLA; return the reason if there is no library, or None."""
    loaded = _load()
    if isinstance(loaded, str):
        return loaded
    try:
        for target in SOURCES:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(loaded, target)), platform="CUDA")
    except (AttributeError, RuntimeError) as error:  # built for another jaxlib
        return _cannot_be_loaded(error)
    return None


def unusable_reason() -> str | None:
    """Return the reason if the library is missing, or has no code for one of the attached GPUs; else None."""
    if (reason := missing_reason()) is not None:
        return reason
    devices = (device for device in jax.local_devices() if device.platform == "gpu")
    reasons = (unsupported_gpu_reason(device) or unbuilt_reason(str(device.compute_capability)) for device in devices)
    return next((reason for reason in reasons if reason is not None), None)


def unbuilt_reason(capability: str) -> str | None:
    """Return the reason if the library has no code for a device of this compute capability, or None.

    A device runs code of the same major version and no higher minor version, and compiles PTX of any lower version.
    """
    loaded = _load()
    if isinstance(loaded, str):
        return None  # `missing_reason` reports it
    built = (read_symbol(loaded, BUILT_FOR) or "").split()
    (major, minor), least = _parse_capability(capability), _parse_capability(built[0])
    codes = [_parse_capability(number) for number in built]
    if (major, minor) >= least or any(of[0] == major and of[1] <= minor for of in codes):
        return None
    return (
        f"{LIBRARY.name} was built for compute capabilities {', '.join(built)}, which do not include {major}{minor}; "
        f"`python -m {__name__} --architectures {major}{minor}` builds it for this device"
    )


def _parse_capability(text: str) -> tuple[int, int]:
    """Return major and minor version of a text such as 8.9 or 89."""
    digits = text.replace(".", "")
    return int(digits[:-1]), int(digits[-1])


@functools.cache
def _load() -> ctypes.CDLL | str:
    """Return the library, or the reason why there is none."""
    if not LIBRARY.exists():
        return f"{LIBRARY.name} was not built; `python -m {__name__}` builds it with nvcc"
    try:
        loaded = ctypes.cdll.LoadLibrary(str(LIBRARY))
    except OSError as error:  # incomplete
        return _cannot_be_loaded(error)
    if read_symbol(loaded, DIGEST) != build.digest_sources(list_sources()):
        return _cannot_be_loaded(OTHER_SOURCES)
    return loaded


def _cannot_be_loaded(error: Exception | str) -> str:
    return f"{LIBRARY.name} cannot be loaded: {error}; rebuild it with `python -m {__name__}`"


def main() -> None:
    """Build the library in place."""
    parser = argparse.ArgumentParser(
        prog="python -m jpaged.kernels.cuda_library", description="Build the CUDA kernels in place."
    )
    parser.add_argument("--nvcc", help="the compiler; by default that of NVIDIA's packages, or an installed one")
    parser.add_argument(
        "--architectures",
        nargs="+",
        default=ARCHITECTURES,
        help=f"compute capabilities without the dot (default: {' '.join(ARCHITECTURES)})",
    )
    options = parser.parse_args()
    try:
        compile_library(LIBRARY, find_nvcc(options.nvcc), build.find_headers(), options.architectures)
    except BuildError as error:
        raise SystemExit(f"the CUDA kernels were not built: {error}") from None


if __name__ == "__main__":
    main()
