"""Every layout of quantized weights is read as what it says, and served as the weights that it stands for."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.weights import load_params, open_tensors
from jpaged.kernels.matmul.quantized import QuantizedMatrix, dequantize
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.models.stack import LayerMode
from tests.checkpoints.quantized.layouts import (
    EXPERT_LAYOUTS,
    LAYOUTS,
    LayoutCase,
    float8,
    write_quantized,
    write_tensors,
)
from tests.device.sharded import place
from tests.models import dense
from tests.models.tiny import TinyCase, tiny_case

FLOAT = np.dtype(np.float32)
_QUICK = ("gptq_desc_act", "w4a16_asymmetric")
SOME_QUICK = [
    pytest.param(layout, marks=() if layout.name in _QUICK else pytest.mark.long, id=layout.name) for layout in LAYOUTS
]


def case_of(layout: LayoutCase) -> TinyCase:
    """Two key/value heads and a feed-forward that blocks of 32 divide; with groups of 16 one that two parts cut."""
    tiny = tiny_case("llama_gqa_bias" if "fp8" in layout.name else "llama_mha")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128 if layout.cuts_nothing else 80,
        "num_hidden_layers": 2 if layout.name == "w8a16" else 1,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return dataclasses.replace(tiny, config={**tiny.config, **sizes, **heads})


def model_of(folder: Path) -> Model:
    return Model(read_config(folder), FLOAT)


def write_plain(case: TinyCase, plain: dict[str, np.ndarray], folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(case.config)), encoding="utf-8")
    write_tensors(plain, folder)
    return folder


def logits(model: Model, params: Params, layer_mode: LayerMode = "loop") -> np.ndarray:
    ids = np.arange(3, 27, dtype=np.int32) * 5 % 131
    return np.asarray(dense.logits(model, params, ids, len(ids), layer_mode))


def is_quantized(leaf: object) -> bool:
    return isinstance(leaf, QuantizedMatrix)


def weights_of(params: Params) -> Params:
    return jax.tree.map(lambda leaf: dequantize(leaf) if is_quantized(leaf) else leaf, params, is_leaf=is_quantized)


def assert_same_weights(got: Params, want: Params) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-7), got, want)


def distance(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(np.square(got - want).mean() / np.square(want).mean()))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.thinned(11)
def test_a_checkpoint_has_the_weights_that_its_layout_says(layout: LayoutCase, tmp_path: Path) -> None:
    case = case_of(layout)
    plain = write_quantized(case, layout, tmp_path / "quantized")
    folder = write_plain(case, plain, tmp_path / "plain")
    model, reference = model_of(tmp_path / "quantized"), model_of(folder)
    params, wanted = load_params(model, tmp_path / "quantized", "loop"), load_params(reference, folder, "loop")
    assert len([leaf for leaf in jax.tree.leaves(params, is_leaf=is_quantized) if is_quantized(leaf)]) > 1
    assert_same_weights(weights_of(params), wanted)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), model.abstract_params("loop"))
    error = distance(logits(model, params), logits(reference, wanted))
    if layout.rounds_rows:
        assert 1e-3 < error < 0.15
    else:
        assert error < 1e-5
    dequantized = dataclasses.replace(model, config=dataclasses.replace(model.config, quantization=None))
    as_weights = load_params(dequantized, tmp_path / "quantized", "loop")
    assert_same_weights(as_weights, wanted)


@pytest.mark.long
def test_a_deepseek_is_read_as_it_is_published(tmp_path: Path) -> None:
    """Blocks of 8 bits in experts and projections alike; what is applied to queries and sums is read as weights."""
    (published,) = (layout for layout in LAYOUTS if layout.name == "deepseek_fp8")
    config = {**published.config, "weight_block_size": [4, 4]}
    layout = dataclasses.replace(published, config=config, write=float8("block", scale=".weight_scale_inv", size=4))
    case = tiny_case("deepseek_v3")
    folder = write_plain(case, write_quantized(case, layout, tmp_path / "quantized"), tmp_path / "plain")
    model, reference = model_of(tmp_path / "quantized"), model_of(folder)
    params, wanted = load_params(model, tmp_path / "quantized", "loop"), load_params(reference, folder, "loop")
    assert is_quantized(params["layers"][2]["mlp"]["experts"]["gate"]["kernel"])
    assert is_quantized(params["layers"][2]["attention"]["kv_down"]["kernel"])
    assert_same_weights(weights_of(params), wanted)
    assert distance(logits(model, params), logits(reference, wanted)) < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS, ids=lambda layout: layout.name)
def test_every_expert_has_what_was_published_of_it(layout: LayoutCase, tmp_path: Path) -> None:
    case = tiny_case("qwen3_moe")
    folder = write_plain(case, write_quantized(case, layout, tmp_path / "quantized"), tmp_path / "plain")
    model, reference = model_of(tmp_path / "quantized"), model_of(folder)
    params, wanted = load_params(model, tmp_path / "quantized", "loop"), load_params(reference, folder, "loop")
    assert_same_weights(weights_of(params), wanted)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), model.abstract_params("loop"))
    got, want = logits(model, params), logits(reference, wanted)
    assert distance(got, want) < (0.15 if layout.rounds_rows else 1e-5)
    down = params["layers"][0]["mlp"]["experts"]["down"]["kernel"]
    if down.input_scale is not None:
        names = [f"model.layers.0.mlp.experts.{expert}.down_proj.input_scale" for expert in range(6)]
        with open_tensors(tmp_path / "quantized") as files:
            stored = [files.read(name, files.shape(name)).item() for name in names]
        np.testing.assert_array_equal(down.input_scale, np.array(stored, np.float32))
        assert len(set(stored)) == 6
    stacked = load_params(model, tmp_path / "quantized", "scan")
    np.testing.assert_allclose(logits(model, stacked, "scan"), got, rtol=0, atol=np.abs(got).max() * 2e-5)


@pytest.mark.long
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS, ids=lambda layout: layout.name)
def test_experts_in_two_parts_compute_the_same(layout: LayoutCase, tmp_path: Path) -> None:
    write_quantized(tiny_case("qwen3_moe"), layout, tmp_path)
    check_two_parts(model_of(tmp_path), tmp_path)


@pytest.mark.parametrize("layout", SOME_QUICK)
def test_a_model_in_two_parts_computes_the_same(layout: LayoutCase, tmp_path: Path) -> None:
    write_quantized(case_of(layout), layout, tmp_path)
    check_two_parts(model_of(tmp_path), tmp_path)


def check_two_parts(model: Model, folder: Path) -> None:
    where = place(model, 2)
    params = load_params(model, folder, "loop", num_parts=2, shardings=where.shardings)
    got = logits(where.model, params)
    want = logits(model, load_params(model, folder, "loop"))
    np.testing.assert_allclose(got[:, : want.shape[1]], want, rtol=0, atol=np.abs(want).max() * 2e-5)
