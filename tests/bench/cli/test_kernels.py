"""`jpaged bench kernels`: the table, the numbers behind it, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.cli.main import main
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention import measure
from jpaged.kernels.paged_attention.measure import CHUNK_TOKENS, AttentionShape, Cell, DeviceLimits, compute_limit

SMALL = ["bench", "kernels", "--shape", "demo", "--dtype", "float32", "--backend", "xla"]


@pytest.mark.long
def test_every_cell_is_measured_or_left_out_by_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers, picture = tmp_path / "a.json", tmp_path / "a.png"
    sizes = ["--num-seqs", "1", "2", "--context", "64", "100000000", "--block-size", "8", "64", "--max-gib", "0.1"]
    assert main([*SMALL, *sizes, "--json", str(numbers), "--plot", str(picture)]) == 0
    record = json.loads(numbers.read_text())
    cells = [(m["cell"]["kind"], m["cell"]["num_seqs"], m["cell"]["block_size"]) for m in record["rows"]]
    assert cells == [
        ("decode", 1, 8),
        ("decode", 1, 64),
        ("decode", 2, 8),
        ("decode", 2, 64),
        ("prefill", 1, 8),
        ("prefill", 1, 64),
    ]
    assert len(record["left_out"]) == 6
    for m in record["rows"]:
        assert m["limit_s"] > 0
        assert min(m["paged_s"], m["in_order_s"], m["contiguous_s"]) > 0
        assert m["over_contiguous"] == pytest.approx(m["paged_s"] / m["contiguous_s"])
        assert m["limit_share"] == pytest.approx(m["limit_s"] / m["paged_s"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "GB/s" in shown
    assert "GiB of keys and values exceed the limit of 0.1 GiB" in " ".join(shown.split())


@pytest.mark.long
def test_a_backend_that_cannot_run_here_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--backend", "pallas-tpu", "--context", "64", "--block-size", "16"]) == 1
    assert "pallas-tpu cannot run here: requires a TPU" in " ".join(capsys.readouterr().out.split())


def test_a_backend_that_nobody_knows_is_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--backend", "magic"]) == 2
    assert "--backend: invalid choice: 'magic'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "llama-9"], "shape: 'llama-9' is not one of demo"),
        (["--context", "0"], "--context: 0 is out of range: must be from 1"),
        (["--block-size", "-8"], "--block-size: -8 is out of range: must be from 1"),
    ],
)
def test_bad_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *words]) == 2
    assert message in capsys.readouterr().err


def test_the_limit_is_what_must_be_moved_or_multiplied() -> None:
    shape, dtype = AttentionShape(32, 8, 128), jnp.dtype("bfloat16")
    by_bytes, by_flops = DeviceLimits(1e9, 1e30), DeviceLimits(1e30, 1e9)
    decode = Cell("decode", 4, 1000, 16)
    assert compute_limit(decode, shape, dtype, by_bytes) == pytest.approx(4 * (2 * 1000 * 8 * 256 + 2 * 32 * 256) / 1e9)
    assert compute_limit(decode, shape, dtype, by_flops) == pytest.approx(4 * 4 * 128 * 32 * 1000 / 1e9)
    prefill = Cell("prefill", 1, 3000, 16)
    num_scores = sum(range(3000 - CHUNK_TOKENS + 1, 3001))
    assert compute_limit(prefill, shape, dtype, by_flops) == pytest.approx(4 * 128 * 32 * num_scores / 1e9)
    window = AttentionShape(32, 8, 128, sliding_window=10)
    assert compute_limit(decode, window, dtype, by_flops) == pytest.approx(4 * 4 * 128 * 32 * 10 / 1e9)
    assert compute_limit(decode, window, dtype, by_bytes) == pytest.approx(4 * (2 * 10 * 8 * 256 + 2 * 32 * 256) / 1e9)


def test_a_static_loop_runs_a_known_number_of_turns_per_call() -> None:
    """Else a GPU waits for the host in each turn."""
    seen: list[jax.Array] = []

    def act(x: jax.Array) -> jax.Array:
        jax.debug.callback(seen.append, x, ordered=True)
        return x + 1

    loop = measure.looped(act, jnp.zeros((), jnp.int32), is_static=True)
    assert loop.turns == measure._STATIC_TURNS > 1
    seen.clear()
    loop.run(3)
    jax.effects_barrier()
    assert [int(x) for x in seen] == list(range(3 * loop.turns))
    program = jax.jit(lambda x: jax.lax.fori_loop(0, loop.turns, lambda _, x: jnp.sin(x), x))
    assert "known_trip_count" in str(program.lower(jnp.zeros(8)).compile().as_text())


def test_a_turn_of_a_static_loop_is_a_part_of_a_call() -> None:
    calls: list[int] = []

    def run(count: int) -> float:
        calls.append(count)
        return 0.5 * count

    assert measure.median_seconds([measure.TimedLoop(run, 10)]) == pytest.approx([0.05])
    assert measure.median_seconds([measure.TimedLoop(run, 1)]) == pytest.approx([0.5])
    assert set(calls) == {1, 2}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_operands_of_measurements_are_random_and_stay_so(dtype: str) -> None:
    """Zeros, and what overflows, take less power than numbers: a device multiplies them faster."""
    layout = KVLayout(1, 300, 8, 2, 32, jnp.dtype(dtype))
    pool = np.asarray(layout.decode(measure.random_pool(layout)), np.float32)
    assert pool.shape == layout.shape
    assert abs(pool.mean()) < 0.1
    assert pool.std() == pytest.approx(1, rel=0.2)
    assert not np.array_equal(pool[0], pool[1])
    x, y = measure.random_factors(64, jnp.dtype("float32"))
    for _ in range(40):
        x = x @ y
    assert 1e-3 < float(x.std()) < 1e3
