"""Runs the CUDA kernels on CPUs: their source compiled as C++, with the lanes of a warp as fibers (emulated.h)."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import jax

from jpaged.kernels import cuda_library as library
from jpaged.kernels.cpu import build
from jpaged.kernels.paged_attention import cuda
from jpaged.kernels.paged_attention.api import implementation
from jpaged.kernels.paged_attention.spec import AttentionCall
from tests.conftest import QUICK_XLA_OPTIONS

# Fibers change stacks by _longjmp, which _FORTIFY_SOURCE forbids.
FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-shared", "-U_FORTIFY_SOURCE"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas"),
)


def read_source(target: str) -> str:
    """Return the source of a function, with the header that all kernels share in its place."""
    header = (library.SHARED / "device.h").read_text(encoding="utf-8").replace("#pragma once\n", "")
    return library.SOURCES[target].read_text(encoding="utf-8").replace('#include "device.h"\n', header)


@functools.cache
def register(target: str = library.TARGET) -> None:
    """Compile the kernels of a function, and register it for CPUs."""
    compile_and_register(read_source(target), target)


def compile_and_register(source: str, target: str) -> None:
    """Compile the kernels from this source, and register their function for CPUs, by another name if it has another."""
    (own,) = (name for name in library.SOURCES if name in source)
    with tempfile.TemporaryDirectory() as folder:
        copy, emulated = Path(folder) / "kernel.cc", Path(folder) / f"lib{target}.so"
        copy.write_text(source.replace(own, target), encoding="utf-8")
        includes = ("-I", str(build.KERNELS / build.SHARED), "-I", str(Path(__file__).parent))
        command = [build.find_compiler(), *FLAGS, *includes, "-isystem", str(build.find_headers())]
        subprocess.run([*command, str(copy), "-o", str(emulated)], check=True, timeout=600)
        loaded = ctypes.cdll.LoadLibrary(str(emulated))
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(loaded, target)), platform="cpu")


def _run(q, pool, layer, rows, spec, scales, division: cuda.Division, target: str) -> tuple[jax.Array, jax.Array]:
    assert target == library.TARGET  # which the call reads: compiled programs are kept for each
    return cuda.attend(AttentionCall(q, pool, layer, rows, spec, scales), division)


_jitted = jax.jit(_run, static_argnames=("spec", "division", "target"), compiler_options=QUICK_XLA_OPTIONS)


def attend(q, pool, layer, rows, spec, scales, division: cuda.Division | None = None) -> tuple[jax.Array, jax.Array]:
    """The backend's `attend`, after its checks; `division` overrides the rule's."""
    register()
    queries = AttentionCall(q, pool, layer, rows, spec, scales).queries
    implementation("cuda", spec, queries)
    division = division or cuda.choose_division(spec, queries)
    return _jitted(q, pool, layer, rows, spec, scales, division=division, target=library.TARGET)
