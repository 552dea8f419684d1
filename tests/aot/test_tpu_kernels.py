"""libtpu makes programs of the TPU kernel for every generation, and none of them copies the pool."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from tests.aot.compile_tpu_attention import GROUPS, MOST_TOKENS, TOPOLOGIES, beyond, latents, limits, pairs

ROOT = Path(__file__).resolve().parents[2]
LONG = {("v6e:2x2", "kinds"), ("tpu7x:2x2x1", "kinds")}
"""A generation of one core and one of two; a group of a topology takes a minute, and the others are deep."""
LIBTPU = Path(os.environ.get("TPU_LIBRARY_PATH", Path(sys.prefix) / "aot/libtpu/libtpu.so"))


@pytest.mark.parametrize(
    ("topology", "group"),
    [
        pytest.param(name, group, marks=pytest.mark.long if (name, group) in LONG else pytest.mark.deep)
        for name in TOPOLOGIES
        for group in ("kinds", "sizes")
    ],
)
def test_attention_compiles_without_copying_the_pool(topology: str, group: str) -> None:
    assert LIBTPU.exists(), f"{LIBTPU} is missing: make aot"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_LIBRARY_PATH": str(LIBTPU),
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    }
    command = [sys.executable, "-m", "tests.aot.compile_tpu_attention", topology, group]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == sum(name == topology for name, _ in GROUPS[group])
    for result in results:
        if result["refusal"] is not None:
            assert "Ran out of memory in memory space smem" in result["error"], result
            continue
        assert "error" not in result, result
        assert result["alias_bytes"] == result["pool_bytes"], result
        assert result["pool_copies"] == 0, result
        # Two cores leave outputs for all tokens each, of which those of both are made.
        copies = 5 if topology == "v5p:2x2x1" else 3
        assert result["temp_bytes"] <= 2**21 + copies * result["query_bytes"], result


def test_the_limits_are_those_of_the_refusals() -> None:
    assert [case.refusal for _, case in (*pairs(), *latents(), *limits())] == [None] * 30
    assert all("of scalar memory; the limit is 1016 KiB" in str(case.refusal) for _, case in beyond())
    for _, case in (one for one in limits() if one[1].num_tokens == MOST_TOKENS):
        more = dataclasses.replace(case, num_tokens=MOST_TOKENS + 128)
        assert "of scalar memory" in str(more.refusal), case


def test_the_cases_cover_all_pairs() -> None:
    rows = [(topology, c.num_kv_heads, c.kv_dtype, c.head_dim, c.block_size) for topology, c in pairs()]
    for a, b in combinations(range(5), 2):
        levels = len({row[a] for row in rows}), len({row[b] for row in rows})
        assert len(Counter((row[a], row[b]) for row in rows)) == levels[0] * levels[1]
    assert [len({row[i] for row in rows}) for i in range(5)] == [4, 4, 3, 3, 3]
