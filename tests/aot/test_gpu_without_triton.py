"""Every model family runs on GPUs in a jax without Pallas Triton: its step calls the kernels of CUDA C++ alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jpaged.kernels.cuda_library import PRODUCT_TARGET, TARGET
from tests.aot.lower_without_triton import WITHOUT_TRITON
from tests.models.tiny import tiny_cases

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_step_of_each_family_lowers_without_pallas_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    architectures = {name for case in tiny_cases() for name in case.config["architectures"]}  # type: ignore[attr-defined]
    assert {(one["model"], one["format"]) for one in found} == {
        (name, form) for name in architectures for form in (None, "int4", "fp8")
    }
    for one in found:
        calls = one["calls"]
        assert set(calls) <= {TARGET, PRODUCT_TARGET, "LayoutConstraint"}, one
        assert calls[TARGET] >= 1, one
        assert (calls.get(PRODUCT_TARGET, 0) >= 1) == (one["is_mixture"] or one["format"] is not None), one
