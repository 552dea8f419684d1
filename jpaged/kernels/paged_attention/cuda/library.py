"""Compiles the CUDA kernels to a shared library, independent of Python, and loads it through jax.ffi.

nvcc is part of jax's CUDA packages (`jax[cuda13]`), and requires a C++ compiler. It needs no GPU:

    python -m jpaged.kernels.paged_attention.cuda.library
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax

from jpaged.kernels.cpu import build
from jpaged.kernels.cpu.build import BuildError

SOURCE = Path(__file__).parent / "kernel.cu"
LIBRARY = SOURCE.with_name("libjpaged_cuda.so")
TARGET = "jpaged_cuda_attend"
"""The function's name in the library and in XLA's table."""
ARCHITECTURES = ("80", "90", "100", "120")
"""Compute capabilities with their own code. 8.6 and 8.9 run that of 8.0; others compile its PTX when it is loaded."""
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
    includes = ("-I", str(build.KERNELS / build.SHARED), "-isystem", str(headers))
    command = [nvcc, *_FLAGS, *codes, *flags, *includes, str(SOURCE), "-o", str(staged)]
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


@functools.cache
def missing_reason() -> str | None:
    """Register the library's function with XLA; return the reason if there is no library, or None."""
    if not LIBRARY.exists():
        return f"{LIBRARY.name} was not built; `python -m {__name__}` builds it with nvcc"
    try:
        loaded = ctypes.cdll.LoadLibrary(str(LIBRARY))
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(getattr(loaded, TARGET)), platform="CUDA")
    except (OSError, AttributeError, RuntimeError) as error:  # an incomplete library, or one built for another jaxlib
        return f"{LIBRARY.name} cannot be loaded: {error}; rebuild it with `python -m {__name__}`"
    return None


def main() -> None:
    """Build the library in place."""
    parser = argparse.ArgumentParser(
        prog="python -m jpaged.kernels.paged_attention.cuda.library", description="Build the CUDA kernels in place."
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
