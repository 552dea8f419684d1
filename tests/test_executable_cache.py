"""The cache of compiled programs that the tests share."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler
from jaxlib import xla_client

from tests import executable_cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that jax compiles through for one test."""
    monkeypatch.setattr(compiler, "backend_compile_and_load", compiler.backend_compile_and_load)
    for owner, name in (
        (xla_client.LoadedExecutable, "serialize"),
        (xla_client.Client, "serialize_executable"),
        (xla_client.Client, "deserialize_executable"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    executable_cache.install(tmp_path)
    return tmp_path


def _run(added: float) -> np.ndarray:
    # A new function for each call: jax keeps the programs of a function in memory.
    return np.asarray(jax.jit(lambda numbers: jnp.cumsum(numbers * 3) + added)(np.arange(9.0)))


def test_a_program_is_stored_once_and_loaded_afterwards(cache: Path):
    first = _run(2.0)
    files = {path.name: path.stat().st_ino for path in cache.iterdir()}
    np.testing.assert_array_equal(_run(2.0), first)
    assert files and {path.name: path.stat().st_ino for path in cache.iterdir()} == files


def test_another_program_is_compiled(cache: Path):
    first = _run(2.0)
    num_files = len(list(cache.iterdir()))
    np.testing.assert_array_equal(_run(3.0), first + 1)
    assert len(list(cache.iterdir())) == num_files + 1


def test_a_loaded_program_is_serialized_as_it_was_stored(cache: Path):
    lowered = jax.jit(lambda numbers: jnp.cumsum(numbers * 3)[::2]).lower(np.arange(9.0))
    for _ in range(2):
        executable = lowered.compile().runtime_executable()
        assert executable is not None and executable.serialize() == next(cache.iterdir()).read_bytes()


def test_the_least_recently_used_programs_are_deleted(tmp_path: Path):
    for age, name in enumerate(("newest", "middle", "oldest")):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    executable_cache.prune(tmp_path, max_bytes=250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["middle", "newest"]
