"""Whole models, compiled by libtpu for TPUs that are not here: they fit, in place, without a copy of pool or weights.

Every test compiles in a process of its own, for jax must not take this one for a TPU's. `make aot` installs libtpu.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.tpu_programs import ProgramResult, compile_cells, library

pytestmark = pytest.mark.long

MIB = 1 << 20


def check(result: ProgramResult, work_mib: int) -> None:
    """One program of a step: what it is given and nothing else, the pool in place, bounded working memory."""
    report = result.report
    assert report is not None, result.out_of_memory
    assert result.made == ()
    assert report.temp_bytes < work_mib * MIB
    is_step = not result.program.startswith("draw")
    assert report.alias_bytes == (result.pool_bytes if is_step else 0)
    # Padding of what the program is given: an arrangement that TPU tiles do not fit costs from 5 % up.
    given = result.weight_bytes + (result.pool_bytes if is_step else 0)
    assert report.argument_bytes < 1.01 * given + MIB


@pytest.mark.parametrize(
    ("cell", "num_devices"),
    [
        ("llama-3-8b@v6e:1x1#backbone[64],backbone[512],draw[64],copy[8]", 1),
        ("llama-3-8b@v5e:2x4#backbone[64]", 8),
        ("llama-3-8b@v5p:2x2x1#backbone[64]", 4),
        ("llama-3-8b@tpu7x:1x1x1#backbone[64]", 2),
        ("llama-3-8b@tpu7x:2x2x2#backbone[64],draw[64]", 16),
        ("llama-3-70b@v6e:2x4#backbone[64]", 8),
        ("opt-13b@v6e:1x1#backbone[64]", 1),
        ("opt-13b@v5p:2x2x2#backbone[64]", 8),
    ],
)
def test_a_model_is_served_in_place(cell: str, num_devices: int) -> None:
    results = compile_cells(cell)
    assert len(results) == cell.count("[")
    for result in results:
        assert (result.num_devices, result.backend) == (num_devices, "pallas-tpu")
        check(result, work_mib=256 if "512" in result.program else 80)


def test_attention_of_xla_is_in_place_too() -> None:
    (result,) = compile_cells("llama-3-8b@v6e:1x1/xla#backbone[64]")
    assert result.backend == "xla"
    check(result, work_mib=80)


@pytest.mark.parametrize("cell", ["llama-3-8b@v5e:1x1", "llama-3-70b@v5e:2x4"])
def test_a_model_that_is_too_large_is_refused_by_the_compiler(cell: str) -> None:
    (result,) = compile_cells(f"{cell}#backbone[64]")
    assert result.report is None
    assert result.out_of_memory is not None
    assert "RESOURCE_EXHAUSTED" in result.out_of_memory
    assert "15.75G" in result.out_of_memory


def test_without_libtpu_the_error_names_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"libtpu\.so is missing: run `make aot`"):
        library()
