"""Matrices that are quantized while they are loaded: which of them, to what, and the same in parts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.names import num_params, weight_bytes
from jpaged.checkpoints.quantized.quantizer import ASKED, FORMATS, quantized_here
from jpaged.checkpoints.weights import load_params, random_params
from jpaged.device.mesh import local_bytes
from jpaged.errors import InvalidArgument
from jpaged.kernels.matmul.quantized import QuantizedMatrix, dequantize, quantize
from jpaged.models.config import Quantization
from jpaged.models.model import Model
from jpaged.models.stack import LayerMode
from tests.checkpoints.quantized.layouts import LAYOUTS, write_quantized, write_tensors
from tests.device.sharded import place
from tests.models import dense
from tests.models.tiny import tensors, tiny_case, write_checkpoint

FLOAT = np.dtype(np.float32)


def quantized(folder: Path, asked: str) -> Model:
    return Model(quantized_here(read_config(folder), asked), FLOAT)


def is_quantized(leaf: object) -> bool:
    return isinstance(leaf, QuantizedMatrix)


@pytest.mark.parametrize("layer_mode", ["loop", "scan"])
@pytest.mark.parametrize("asked", ASKED)
def test_the_matrices_of_layers_are_rounded_and_nothing_else(asked, layer_mode: LayerMode, tmp_path: Path) -> None:
    folder = write_checkpoint(tiny_case("qwen2"), tmp_path)
    plain = load_params(Model(read_config(folder), FLOAT), folder, layer_mode)
    model = quantized(folder, asked)
    params = load_params(model, folder, layer_mode)
    paths = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    for (path, leaf), weights in zip(paths, jax.tree.leaves(plain), strict=True):
        name = jax.tree_util.keystr(path)
        assert is_quantized(leaf) == (name.endswith("['kernel']")), name
        if is_quantized(leaf):
            wanted = quantize(weights, FORMATS[asked], axis=leaf.axis)
            jax.tree.map(np.testing.assert_array_equal, leaf, wanted)
        else:
            np.testing.assert_array_equal(leaf, weights)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), model.abstract_params(layer_mode))
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    halves = sum(leaf.values.size / 2 for _, leaf in paths if is_quantized(leaf)) if asked == "int4" else 0
    assert weight_bytes(model.config, 4) == held - halves
    assert weight_bytes(read_config(folder), 4) == 4 * num_params(model.config)


@pytest.mark.parametrize(("name", "asked"), [("llama3_tied", "int4-all"), ("gpt_neox", "fp8-all"), ("opt", "int8-all")])
def test_all_includes_the_embedding_and_the_output_matrix(name: str, asked: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tiny_case(name), tmp_path)
    plain = load_params(Model(read_config(folder), FLOAT), folder, "loop")
    model = quantized(folder, asked)
    params = load_params(model, folder, "loop")
    found = {tree: params[tree]["embedding"] for tree in ("embed", "lm_head") if tree in params}
    assert len(found) == 2 - model.config.tie_word_embeddings
    for tree, matrix in found.items():
        wanted = quantize(plain[tree]["embedding"], FORMATS["int8"], axis=-1)
        jax.tree.map(np.testing.assert_array_equal, matrix, wanted)
    if "positions" in params:
        np.testing.assert_array_equal(params["positions"]["embedding"], plain["positions"]["embedding"])
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if not asked.startswith("int4"):  # whose numbers take a byte here
        assert weight_bytes(model.config, 4) == held


@pytest.mark.parametrize("asked", ["int8", "int4", pytest.param("int8-all", marks=pytest.mark.long)])
@pytest.mark.parametrize(("num_parts", "layer_mode"), [(2, "scan"), pytest.param(4, "loop", marks=pytest.mark.long)])
@pytest.mark.thinned(2)
def test_parts_are_of_the_same_numbers(asked: str, num_parts: int, layer_mode: LayerMode, tmp_path: Path) -> None:
    folder = write_checkpoint(tiny_case("llama3_tied"), tmp_path)
    model = quantized(folder, asked)
    where = place(model, num_parts, layer_mode)
    params = load_params(model, folder, layer_mode, num_parts=num_parts, shardings=where.shardings)
    ids = np.arange(3, 27, dtype=np.int32) * 5 % 131
    got = np.asarray(dense.logits(where.model, params, ids, len(ids), layer_mode))
    want = np.asarray(dense.logits(model, load_params(model, folder, "loop"), ids, len(ids)))
    np.testing.assert_allclose(got[:, : want.shape[1]], want, rtol=0, atol=np.abs(want).max() * 2e-5)
    shares = [leaf.addressable_shards[0].data.size / leaf.size for leaf in jax.tree.leaves(params["layers"])]
    assert shares.count(1 / num_parts) >= 6  # values and scales of every matrix that is split
    made = random_params(where.model, layer_mode, seed=1, shardings=where.shardings)
    assert local_bytes(made) == local_bytes(params)
    assert all(
        np.isfinite(dequantize(leaf)).all()
        for leaf in jax.tree.leaves(made, is_leaf=is_quantized)
        if is_quantized(leaf)
    )


def test_what_is_quantized_is_not_rounded_again(tmp_path: Path) -> None:
    awq = next(layout for layout in LAYOUTS if layout.name == "awq")
    write_quantized(tiny_case("llama_mha"), dataclasses.replace(awq, left=("mlp",)), tmp_path)
    with pytest.raises(
        InvalidArgument, match="quantization: is int8, but the checkpoint is already quantized with awq"
    ):
        quantized_here(read_config(tmp_path), "int8")


def test_the_option_may_name_the_method_of_the_checkpoint(tmp_path: Path) -> None:
    awq = next(layout for layout in LAYOUTS if layout.name == "awq")
    write_quantized(tiny_case("llama_mha"), dataclasses.replace(awq, left=("mlp",)), tmp_path)
    config = read_config(tmp_path)
    assert quantized_here(config, "awq") is config
    assert quantized_here(config, "awq_marlin") is config
    with pytest.raises(InvalidArgument, match="is gptq_marlin, but the checkpoint is quantized with awq: remove"):
        quantized_here(config, "gptq_marlin")
    plain = dataclasses.replace(config, quantization=None)
    with pytest.raises(InvalidArgument, match="quantization: is awq, but the checkpoint is not quantized"):
        quantized_here(plain, "awq")
    for name in ("bitsandbytes", "hqq", "torchao", "modelopt"):
        with pytest.raises(
            InvalidArgument, match=f"is {name}, but the checkpoint is not quantized: .* use one of int8"
        ):
            quantized_here(plain, name)
    gptq = dataclasses.replace(plain, quantization=Quantization("gptq", ()))
    assert all(quantized_here(gptq, name) is gptq for name in ("gptq", "gptq_marlin", "moe_wna16"))
    rounded = quantized_here(plain, "fp8")
    assert rounded.quantization is not None
    assert quantized_here(rounded, "fp8") is rounded


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    case = tiny_case("llama_mha")
    folder = write_checkpoint(case, tmp_path)
    stored = tensors(case)
    stored["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    write_tensors(stored, folder)
    with pytest.raises(InvalidArgument, match=r"layers\.1\.mlp\.up_proj\.weight has 1 of"):
        load_params(quantized(folder, "int8"), folder, "loop")


@pytest.mark.parametrize(
    "asked",
    [
        "int8",
        pytest.param("int4", marks=pytest.mark.long),
        pytest.param("fp8", marks=pytest.mark.long),
        pytest.param("int8-all", marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_the_demo_tells_stories_in_fewer_bits(asked: str) -> None:
    llm = LLM("demo", quantization=asked, num_blocks=32, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64)
    (output,) = llm.generate(["Once upon a time"], SamplingParams(max_tokens=16, temperature=0))
    assert output.outputs[0].text.startswith(", there was a")
