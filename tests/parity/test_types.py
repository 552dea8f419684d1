"""Every family in every type of weights, on one device and on two: as far from float32 as they are, and no further."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints.quantized.quantizer import ASKED, quantized_here
from jpaged.checkpoints.weights import load_params
from jpaged.kernels.matmul.quantized import QuantizedMatrix, dequantize
from jpaged.models.hf_config import from_hf
from jpaged.models.layers import Params
from jpaged.models.model import Model
from tests.device.sharded import place
from tests.models import dense
from tests.models.tiny import tiny_case, write_checkpoint
from tests.parity import cases

# Every family's products are of every type; which one is long goes round, and the others are deep.
QUANTISED = [
    pytest.param(name, asked, marks=pytest.mark.long if (i + j) % len(ASKED) == 0 else pytest.mark.deep)
    for i, name in enumerate(cases.FAMILIES)
    for j, asked in enumerate(ASKED)
]
MORE_SENSITIVE = {
    "qwen3_next": 0.05,
    "qwen3_5_moe_text": 0.05,
    "granitemoehybrid": 0.05,
    "minimax_m2": 0.05,
    "gemma4_text": 0.06,
    "gemma3n_text": 0.07,
    "gemma4_moe": 0.4,
    "gemma4_keys": 0.1,
}
"""Families whose tiny model turns the same rounding into more. The numbers are those of bfloat16.

qwen3_next: transformers' own bfloat16 is 0.040 away, and jpaged's 0.040. qwen3_5_moe_text has the same layers; its
float16 is 0.0039 away, where 0.00375 would be the limit. granitemoehybrid: 0.043 and 0.038.
minimax_m2: two experts of the tenth token are nearly tied. The nine before it are 0.008 away, and 0.010 in
transformers.
gemma4_text, gemma3n_text, gemma4_keys and gemma4_moe, jpaged's and transformers' own: 0.047 and 0.048, 0.052 and 0.058,
0.073 and 0.086, 0.18 and 0.35; in float16 0.0059 and 0.0062, 0.0059 and 0.0071, 0.0103 and 0.0106, 0.038 and 0.039.
Routers of tiny models are nearly tied.
"""
TOKEN_IDS = np.arange(3, 43, dtype=np.int32) * 5 % 131

pytestmark = pytest.mark.usefixtures("quick_programs")


def is_quantized(leaf: object) -> bool:
    return isinstance(leaf, QuantizedMatrix)


def logits_of(model: Model, params: Params) -> np.ndarray:
    return np.asarray(dense.logits(model, params, TOKEN_IDS, len(TOKEN_IDS)))


def on_two(model: Model, folder: Path) -> np.ndarray:
    """The logits of the model in two parts, without what its vocabulary is padded by."""
    where = place(model, 2, "loop")
    params = load_params(model, folder, "loop", num_parts=2, shardings=where.shardings)
    return logits_of(where.model, params)[:, : model.config.vocab_size]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.deep if i % 2 else pytest.mark.long)
        for i, name in enumerate(cases.FAMILIES)
    ],
)
def test_bfloat16_is_as_close_as_its_digits_allow(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tiny_case(name), tmp_path)
    exact, rounded = (Model(from_hf(tiny_case(name).config), np.dtype(dtype)) for dtype in (jnp.float32, jnp.bfloat16))
    want = logits_of(exact, load_params(exact, folder, "loop"))
    for got in (logits_of(rounded, load_params(rounded, folder, "loop")), on_two(rounded, folder)):
        assert got.dtype == np.float32
        assert np.median(np.abs(got - want)) < MORE_SENSITIVE.get(name, 0.03) * want.std()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.deep if i % 6 else pytest.mark.long)
        for i, name in enumerate(cases.FAMILIES)
    ],
)
def test_float16_is_as_close_as_its_digits_allow(name: str, tmp_path: Path) -> None:
    """It has three bits more than bfloat16: an eighth of the error. These weights are far from its largest number."""
    folder = write_checkpoint(tiny_case(name), tmp_path)
    exact, rounded = (Model(from_hf(tiny_case(name).config), np.dtype(dtype)) for dtype in (jnp.float32, jnp.float16))
    want = logits_of(exact, load_params(exact, folder, "loop"))
    for got in (logits_of(rounded, load_params(rounded, folder, "loop")), on_two(rounded, folder)):
        assert got.dtype == np.float32
        assert np.median(np.abs(got - want)) < MORE_SENSITIVE.get(name, 0.03) / 8 * want.std()


@pytest.mark.parametrize(("name", "asked"), QUANTISED)
def test_quantized_matrices_multiply_as_what_they_stand_for(name: str, asked: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tiny_case(name), tmp_path)
    plain = from_hf(tiny_case(name).config)
    model, exact = Model(quantized_here(plain, asked), np.dtype(np.float32)), Model(plain, np.dtype(np.float32))
    params = load_params(model, folder, "loop")
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    num_least = sum(4 if kind.has_feed_forward else 2 for kind in plain.layer_kinds)
    assert sum(map(is_quantized, leaves)) >= num_least
    meant = jax.tree.map(lambda leaf: dequantize(leaf) if is_quantized(leaf) else leaf, params, is_leaf=is_quantized)
    want = logits_of(exact, meant)
    rounding = np.abs(logits_of(exact, load_params(exact, folder, "loop")) - want).max()
    assert rounding > 1e-3 * np.abs(want).max(), "weights are rounded, and by more than a product is"
    for got in (logits_of(model, params), on_two(model, folder)):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())
