"""A step reads a prefix that its rows share once, and samples what it samples without."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from jpaged.config import Backend
from jpaged.device.executor import JaxExecutor
from jpaged.device.step_costs import cascade_costs
from jpaged.engine.executor import StepInputs, StepOutputs
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVForm, KVLayout
from tests.device import tiny_model
from tests.device.driver import Driver, Row, Sequence

BLOCK_SIZE = 8
SHARED = 40
"""Tokens that all sequences begin with: five blocks."""


@pytest.fixture(scope="module")
def executor() -> Iterator[JaxExecutor]:
    executor = tiny_model.warm_executor()
    yield executor
    executor.shutdown()


def sequences(driver: Driver) -> list[Sequence]:
    """Three whose tables begin alike; the first has computed the prefix, for all."""
    rng = np.random.default_rng(0)
    common = rng.integers(3, 60, SHARED).tolist()
    found = [driver.sequence([*common, *rng.integers(3, 60, 3 + 2 * i).tolist()]) for i in range(3)]
    for num_tokens in (16, 16, SHARED - 32):
        driver.run([Row(found[0], num_tokens)])
    for sequence in found[1:]:
        sequence.blocks[: SHARED // BLOCK_SIZE] = found[0].blocks[: SHARED // BLOCK_SIZE]
        sequence.num_computed = SHARED
    return found


def logprobs_of(outputs: StepOutputs) -> list[float]:
    return [outputs.logprob(row) for row in range(3)]


@pytest.mark.long
def test_sampled_tokens_and_probabilities_are_the_same(executor: JaxExecutor) -> None:
    driver = Driver(executor)
    rows = [Row(sequence, sequence.prompt_len - SHARED) for sequence in sequences(driver)]
    plain = driver.inputs(rows)
    kv_begins_s = np.array([SHARED] * 3 + [0], np.int32)
    run_starts_s1 = np.array([0, 3, 3, 3, 3], np.int32)
    together = dataclasses.replace(plain, kv_begins_s=kv_begins_s, run_starts_s1=run_starts_s1, num_runs=1)
    sampling = driver.sampling(rows)

    def run(inputs: StepInputs) -> StepOutputs:
        return executor.collect(executor.sample(executor.forward(inputs), sampling))

    want, got = run(plain), run(together)
    np.testing.assert_array_equal(got.token_ids_rn[:3, 0], want.token_ids_rn[:3, 0])
    np.testing.assert_allclose(logprobs_of(got), logprobs_of(want), rtol=0, atol=1e-5)
    # The prefix is read through the first row: what the others' tables name there does not matter.
    tables = together.block_tables_gsm.copy()
    tables[0, 1:3, : SHARED // BLOCK_SIZE] = 0
    again = run(dataclasses.replace(together, block_tables_gsm=tables))
    assert logprobs_of(again) == logprobs_of(got)
    assert executor.num_compiles_after_warm_up == 0


@pytest.mark.parametrize("backend", ["cpu", "xla", "pallas-tpu"])
@pytest.mark.parametrize("block_size", [1, 8, 48, 256])
def test_a_granule_is_whole_blocks(block_size: int, backend: Backend) -> None:
    form: KVForm = "tpu" if backend == "pallas-tpu" else "cpu"
    layout, kind = KVLayout(1, 4, block_size, 2, 16, np.dtype("float32"), form), AttentionKind(1.0)
    costs = cascade_costs(backend, layout, [kind, kind], 4)
    assert costs is not None
    assert costs.granule_tokens % block_size == 0


def test_on_hopper_a_tile_of_queries_costs_what_one_row_does() -> None:
    layout = KVLayout(32, 100, 16, 8, 128, np.dtype("int8"), "gpu")
    costs = cascade_costs("pallas-gpu", layout, [AttentionKind(1.0)] * 32, 32)
    assert costs is not None
    assert (costs.tile_queries, costs.tile_cost(16, 64), costs.tile_cost(17, 64)) == (16, 1.0, 1.0)
    assert (costs.granule_tokens, costs.query_tokens, costs.windows) == (16, 8.0, ())
    assert costs.step_tokens == 1e6 / (8 * 2 * 128)  # bytes over those of a token in a layer
    assert cascade_costs("xla", layout, [AttentionKind(1.0)] * 32, 32) is None


@pytest.mark.parametrize(
    ("dtype", "head_dim", "tile_queries"), [("bfloat16", 128, 8), ("int8", 128, 8), ("int8", 256, 4)]
)
def test_with_triton_a_tile_is_as_large_as_the_kernel_makes_it(dtype: str, head_dim: int, tile_queries: int) -> None:
    layout = KVLayout(32, 100, 16, 8, head_dim, np.dtype(dtype), "gpu")
    costs = cascade_costs("pallas-triton", layout, [AttentionKind(1.0)] * 32, 32)
    assert costs is not None
    assert (costs.tile_queries, costs.tile_cost(tile_queries, 64), costs.query_tokens) == (tile_queries, 1.0, 16.0)


def test_with_cuda_a_tile_has_16_query_heads() -> None:
    layout = KVLayout(32, 100, 16, 8, 128, np.dtype("bfloat16"), "gpu")
    costs = cascade_costs("cuda", layout, [AttentionKind(1.0)] * 32, 32)
    assert costs is not None
    assert (costs.tile_queries, costs.query_tokens) == (4, 12.0)
    assert costs.step_tokens == 16e6 / (8 * 2 * 128 * 2)


@pytest.mark.parametrize(
    ("backend", "form", "passes"), [("pallas-gpu", "gpu", 1.0), ("pallas-triton", "gpu", 1.0), ("xla", "cpu", 1.5)]
)
def test_windows_are_counted_by_layers(backend: Backend, form: KVForm, passes: float) -> None:
    layout, full = KVLayout(6, 100, 16, 8, 128, np.dtype("bfloat16"), form), AttentionKind(1.0)
    narrow = dataclasses.replace(full, sliding_window=1024)
    plain, costs = (cascade_costs(backend, layout, kinds, 32) for kinds in ([full] * 6, [*[narrow] * 3, *[full] * 3]))
    assert plain is not None
    assert costs is not None
    assert costs.windows == ((1024, 0.5),)
    assert (costs.step_tokens, costs.query_tokens) == (plain.step_tokens * passes, plain.query_tokens * passes)
    assert plain.seen_tokens(2000, 5000) == 2000
    assert costs.seen_tokens(2000, 5000) == 1000  # the window has left the prefix
    assert costs.seen_tokens(2000, 2524) == 1250
    assert costs.seen_tokens(800, 1000) == 800
