"""Compiles the CPU kernels: a plain shared library, independent of Python, that is loaded through jax.ffi.

    core.cc     of each operation, once for each kind of processor    (selected at run time)
    kernel.cc   of each operation, once, with the headers of jaxlib
    *.cc        other files in these folders and in this one, once, without jaxlib's headers
        -> libjpaged_cpu.so next to this file, with a digest of these files

`setup.py` builds it during installation, and reads only this file, which imports neither jax nor jpaged. Run it
manually after the sources have changed, or after installing a compiler:

    python -m jpaged.kernels.cpu.build
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

KERNELS = Path(__file__).parents[1]
LIBRARY = Path(__file__).parent / "libjpaged_cpu.so"
SHARED = "cpu"
"""The folder, below `KERNELS`, of the headers that all operations share."""
OPERATIONS = {
    "Attention": "paged_attention/cpu",
    "Experts": "experts/cpu",
    "Lora": "lora/cpu",
    "Product": "matmul/cpu",
    "Recurrence": "cpu/recurrence",
    "Sampling": "sampling/cpu",
}
"""The folder of each operation's sources; its cores are called k<Operation><Processor>."""
COMPILERS = ("c++", "g++", "clang++")
DIGEST = "jpaged_sources"
"""The library's symbol with the digest of the files that it was compiled from."""

_Core = tuple[str, int, tuple[str, ...]]

# Name, floats in a vector, and the processor's features; the names are declared in each kernel.cc.
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma")
_X86_CORES: tuple[_Core, ...] = (("Avx512", 16, _AVX512), ("Avx2", 8, ("-mavx2", "-mfma")))
_AVX512_BF16: _Core = ("Avx512Bf16", 16, (*_AVX512, "-mavx512bf16", "-mavx512vnni"))
# Another core of products, if the compiler has it: GCC since 11, clang since 12.
_AVX_VNNI: _Core = ("AvxVnni", 8, ("-mavx2", "-mfma", "-mavxvnni"))
_OWN_CORES: dict[str, tuple[_Core, ...]] = {
    "Attention": (_AVX512_BF16,),
    "Product": (_AVX512_BF16, ("Avx512Vnni", 16, (*_AVX512, "-mavx512vnni")), _AVX_VNNI),
}
_ARM_PRODUCT_CORES: tuple[_Core, ...] = (
    ("I8mm", 4, ("-march=armv8.2-a+dotprod+i8mm",)),
    ("Dotprod", 4, ("-march=armv8.2-a+dotprod",)),
)
_BASELINE: _Core = ("Baseline", 4, ())
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Wno-psabi", "-ffp-contract=fast")
_TIMEOUT_S = 600


class BuildError(Exception):
    """The reason why the kernels were not built."""


def find_compiler(wanted: str | None = None) -> str:
    """Return the path of the C++ compiler: the given one, or the first one found.

    Raises:
        BuildError: there is none.
    """
    names = (wanted,) if wanted else COMPILERS
    for name in names:
        if (path := shutil.which(name)) is not None:
            return path
    raise BuildError(f"no C++ compiler was found ({', '.join(names)})")


def find_headers() -> Path:
    """Return the folder of XLA's headers, which are part of jaxlib.

    Raises:
        BuildError: jaxlib is not installed, or has no headers.
    """
    found = importlib.util.find_spec("jaxlib")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    for folder in folders:
        headers = Path(folder) / "include"
        if (headers / "xla" / "ffi" / "api" / "ffi.h").exists():
            return headers
    raise BuildError("XLA's headers were not found: jaxlib is not installed")


def digest_sources(paths: Iterable[Path]) -> str:
    """Return a digest of the names and contents of source files."""
    found = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes()
        found.update(f"{path.parent.name}/{path.name} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()[:16]


def list_sources(sources: Path = KERNELS, operations: Collection[str] = tuple(OPERATIONS)) -> list[Path]:
    """Return the files that `build` compiles or includes."""
    folders = [SHARED, *(OPERATIONS[operation] for operation in operations)]
    return [path for folder in folders for pattern in ("*.cc", "*.h") for path in (sources / folder).glob(pattern)]


def define_symbol(symbol: str, value: str) -> str:
    """Return C++ source that defines a symbol with this text."""
    return f'extern "C" {{\nextern const char {symbol}[];\nconst char {symbol}[] = "{value}";\n}}\n'


def build(
    library: Path,
    compiler: str,
    headers: Path,
    sources: Path = KERNELS,
    operations: Collection[str] = tuple(OPERATIONS),
) -> None:
    """Compile `sources`, a folder like `KERNELS`, and write the library atomically.

    Raises:
        BuildError: compilation failed; has the compiler's output.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        jobs = []
        has_avx_vnni = _accepts(compiler, _AVX_VNNI[2])
        defines = ("-DJPAGED_HAS_AVXVNNI",) if has_avx_vnni else ()
        for operation in operations:
            compile_ = [compiler, *_FLAGS, *defines, "-I", str(sources / SHARED), "-c"]
            cores = [core for core in _cores(operation) if core is not _AVX_VNNI or has_avx_vnni]
            jobs += [_core(compile_, sources, work, operation, core) for core in cores]
            kernel = [str(sources / OPERATIONS[operation] / "kernel.cc"), "-o", str(work / f"{operation}.o")]
            jobs.append([*compile_, "-isystem", str(headers), *kernel])
        for place in (SHARED, *(OPERATIONS[operation] for operation in operations)):
            others = (path for path in sorted((sources / place).glob("*.cc")) if path.stem not in ("core", "kernel"))
            compile_ = [compiler, *_FLAGS, "-I", str(sources / SHARED), "-c"]
            jobs += [[*compile_, str(path), "-o", str(work / f"{path.stem}.o")] for path in others]
        digest = work / "digest.cc"
        digest.write_text(define_symbol(DIGEST, digest_sources(list_sources(sources, operations))))
        jobs.append([compiler, *_FLAGS, "-c", str(digest), "-o", str(work / "digest.o")])
        _run_all(jobs)
        linked = work / library.name
        _run_all([[compiler, "-shared", "-pthread", *(job[-1] for job in jobs), "-o", str(linked)]])
        # Staged next to the old library, then renamed over it: a process that has the old one loaded keeps it.
        staged = library.with_name(f".{library.name}.{os.getpid()}")
        shutil.copy(linked, staged)
        staged.replace(library)


def _cores(operation: str) -> Sequence[_Core]:
    machine, is_product = platform.machine().lower(), operation == "Product"
    if machine in {"aarch64", "arm64"}:
        return (*(_ARM_PRODUCT_CORES if is_product else ()), _BASELINE)
    if machine not in {"x86_64", "amd64"}:
        return (_BASELINE,)
    return (*_OWN_CORES.get(operation, ()), *_X86_CORES, _BASELINE)


def _accepts(compiler: str, flags: Sequence[str]) -> bool:
    """Return True if a compiler knows these flags for the machine."""
    probe = [compiler, *flags, "-E", "-x", "c++", os.devnull]
    return subprocess.run(probe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def _core(compile_: list[str], sources: Path, work: Path, operation: str, core: _Core) -> list[str]:
    name, width, features = core
    defines = (f"-DJPAGED_WIDTH={width}", f"-DJPAGED_CORE=k{operation}{name}", f'-DJPAGED_NAME="{name.lower()}"')
    source = sources / OPERATIONS[operation] / "core.cc"
    return [*compile_, *features, *defines, str(source), "-o", str(work / f"{operation}{name}.o")]


def _run_all(jobs: Sequence[list[str]]) -> None:
    """Run the commands in parallel."""
    started = [subprocess.Popen(job, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for job in jobs]
    try:
        outputs = [process.communicate(timeout=_TIMEOUT_S)[0] for process in started]
    except subprocess.TimeoutExpired:
        raise BuildError(f"{jobs[0][0]} took more than {_TIMEOUT_S} s") from None
    finally:
        for process in started:
            process.kill()
            process.wait()
    for job, process, output in zip(jobs, started, outputs, strict=True):
        if process.returncode:
            raise BuildError(f"exit status {process.returncode} of {' '.join(job)}\n{output}")


def main() -> None:
    """Build the library in place."""
    parser = argparse.ArgumentParser(
        prog="python -m jpaged.kernels.cpu.build", description="Build the library in place."
    )
    parser.add_argument("--compiler", help=f"a C++ compiler; by default the first of {', '.join(COMPILERS)}")
    options = parser.parse_args()
    try:
        build(LIBRARY, find_compiler(options.compiler), find_headers())
    except BuildError as error:
        raise SystemExit(f"the CPU kernels were not built: {error}") from None


if __name__ == "__main__":
    main()
