"""Adapters beside a base that is rounded: each row has the base's product, as it was rounded, and its adapter's own.

The adapter is never rounded with the base: what is expected is the base's numbers, taken back, and the adapter's
product with nothing rounded, in float32. Merging first and rounding then would give other logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jpaged.checkpoints.adapters import AdapterReader
from jpaged.checkpoints.quantized.quantizer import quantized_here
from jpaged.checkpoints.weights import load_params
from jpaged.config import EngineConfig
from jpaged.device.executor import JaxExecutor
from jpaged.device.mesh import MeshPlacement, serving_mesh
from jpaged.engine.executor import Detail, StepOutputs
from jpaged.kernels.matmul.quantized import QuantizedMatrix, dequantize
from jpaged.models.hf_config import from_hf
from jpaged.models.layers import Params
from jpaged.models.model import Model
from tests.device import tiny_model
from tests.device.driver import Driver, Row
from tests.models import dense
from tests.models.adapters import TinyAdapter
from tests.models.tiny import tiny_case, write_checkpoint

CASE = tiny_case("llama_gqa_bias")
FLOAT32 = np.dtype(np.float32)
ADAPTERS = (TinyAdapter(CASE, "first"), TinyAdapter(CASE, "second", 5, 2.0, "q_proj|down_proj"))
SLOTS = (2, 0, 1, 2)
"""The slots of the rows of the step; slot s has adapter s - 1."""
OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_blocks": 40,
    "block_size": 8,
    "max_model_len": 64,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 5,
}
NUM_TOKENS = 5


def model_of(dtype: str, quantization: str) -> Model:
    return Model(quantized_here(from_hf(CASE.config), quantization), np.dtype(jax.numpy.dtype(dtype)))


def step(folder: Path, dtype: str, quantization: str, **options: Any) -> StepOutputs:
    """One step of prompts whose rows have the adapters of SLOTS."""
    model = model_of(dtype, quantization)
    chosen = EngineConfig.load({**OPTIONS, **options})
    where = MeshPlacement.of(model, serving_mesh(1))
    params = load_params(model, write_checkpoint(CASE, folder / "base"), where.layer_mode, shardings=where.shardings)
    executor = JaxExecutor.create(model, params, chosen, mesh=where.mesh)
    executor.warm_up(tiny_model.quiet)
    read, driver = AdapterReader(model, where.layer_mode, 1, 5), Driver(executor)
    for slot, adapter in enumerate(ADAPTERS, 1):
        executor.load_adapter(slot, read(adapter.write(folder / adapter.name)))
    rows = []
    for index, slot in enumerate(SLOTS):
        sequence = driver.sequence(CASE.prompt()[index : index + NUM_TOKENS])
        sequence.adapter = slot
        rows.append(Row(sequence, NUM_TOKENS))
    outputs = driver.run(rows, detail=Detail.TOP_LOGPROBS)
    executor.shutdown()
    return outputs


def expected(folder: Path, dtype: str, quantization: str, slots: Sequence[int]) -> np.ndarray:
    """Log-probabilities `[rows, V]`, in float32, of the base as it was rounded and the adapter added to it."""

    def plain(params: Params) -> Params:
        def is_quantized(leaf: Any) -> bool:
            return isinstance(leaf, QuantizedMatrix)

        def numbers(leaf: Any) -> jax.Array:
            return (dequantize(leaf) if is_quantized(leaf) else leaf).astype(FLOAT32)

        taken_back: Params = jax.tree.map(numbers, params, is_leaf=is_quantized)
        return taken_back

    model, written = Model(from_hf(CASE.config), FLOAT32), write_checkpoint(CASE, folder / "written")
    rounded = plain(load_params(model_of(dtype, quantization), written, "loop"))
    exact, found = load_params(model, written, "loop"), []
    for index, slot in enumerate(slots):
        params = rounded
        if slot:
            merged = load_params(model, ADAPTERS[slot - 1].write_merged(folder / f"merged-{slot}"), "loop")
            params = jax.tree.map(lambda base, with_it, without: base + (with_it - without), rounded, merged, exact)
        ids = jax.numpy.asarray(CASE.prompt()[index : index + NUM_TOKENS], jax.numpy.int32)
        found.append(np.asarray(jax.nn.log_softmax(dense.logits(model, params, ids, NUM_TOKENS)[-1])))
    return np.stack(found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "quantization", "backend", "tolerance"),
    [
        ("float32", "int8", "cpu", 1e-4),
        ("float32", "int8", "xla", 1e-4),
        ("bfloat16", "auto", "cpu", 0.12),
        ("bfloat16", "int8", "cpu", 0.12),
    ],
    ids=["int8", "int8-xla", "bfloat16", "bfloat16-int8"],
)
def test_each_row_has_the_rounded_base_and_its_own_adapter(
    dtype: str, quantization: str, backend: str, tolerance: float, tmp_path: Path
) -> None:
    outputs = step(tmp_path, dtype, quantization, linear_backend=backend, activation_dtype="model")
    want_sv, without_sv = (expected(tmp_path, dtype, quantization, slots) for slots in (SLOTS, (0,) * len(SLOTS)))
    has_one = np.asarray(SLOTS) > 0
    assert np.abs(want_sv - without_sv)[has_one].max(axis=1).min() > 3 * tolerance, "adapters do something"
    assert outputs.top_ids_rnk is not None and outputs.top_logprobs_rnk is not None
    for row in range(len(SLOTS)):
        top_ids_k = outputs.top_ids_rnk[row, 0]
        np.testing.assert_allclose(outputs.top_logprobs_rnk[row, 0], want_sv[row, top_ids_k], rtol=0, atol=tolerance)
