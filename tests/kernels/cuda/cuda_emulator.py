"""Runs the CUDA kernels on CPUs: their source compiled as C++, with the lanes of a warp as fibers (emulated.h)."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

import jax

from jpaged.kernels.cpu import build
from jpaged.kernels.paged_attention.api import implementation
from jpaged.kernels.paged_attention.cuda import attention as cuda
from jpaged.kernels.paged_attention.cuda import library
from jpaged.kernels.paged_attention.spec import AttentionCall
from tests.conftest import QUICK_XLA_OPTIONS

# Fibers change stacks by _longjmp, which _FORTIFY_SOURCE forbids.
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas")


@functools.cache
def register() -> None:
    """Compile the kernels, and register their function for CPUs."""
    with tempfile.TemporaryDirectory() as folder:
        emulated = Path(folder) / "libjpaged_cuda_emulated.so"
        includes = ("-I", str(build.KERNELS / build.SHARED), "-I", str(Path(__file__).parent))
        sources = ("-isystem", str(build.find_headers()), "-x", "c++", str(library.SOURCE))
        command = [build.find_compiler(), *FLAGS, "-U_FORTIFY_SOURCE", *includes, *sources, "-o", str(emulated)]
        subprocess.run(command, check=True, timeout=300)
        library.register(emulated, "cpu")


def _run(q, pool, layer, rows, spec, scales, division: cuda.Division) -> tuple[jax.Array, jax.Array]:
    return cuda.attend(AttentionCall(q, pool, layer, rows, spec, scales), division)


_jitted = jax.jit(_run, static_argnames=("spec", "division"), compiler_options=QUICK_XLA_OPTIONS)


def attend(q, pool, layer, rows, spec, scales, division: cuda.Division | None = None) -> tuple[jax.Array, jax.Array]:
    """The backend's `attend`, after its checks; `division` overrides the rule's."""
    register()
    queries = AttentionCall(q, pool, layer, rows, spec, scales).queries
    implementation("cuda", spec, queries)
    return _jitted(q, pool, layer, rows, spec, scales, division=division or cuda.choose_division(spec, queries))
