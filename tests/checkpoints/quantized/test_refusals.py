"""Tensors of quantized checkpoints that stand for no weights are refused by their names, and others are not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jpaged.checkpoints.hub import find_scheme, read_json
from jpaged.checkpoints.weights import load_params, open_tensors, read_kv_scales
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.hf_config import from_hf
from tests.checkpoints.quantized.layouts import LAYOUTS, LayoutCase, with_tensor, write_quantized, write_tensors
from tests.checkpoints.quantized.test_layouts import case_of, model_of
from tests.models.tiny import tiny_case, write_checkpoint

OF = {layout.name: layout for layout in LAYOUTS}


def layout_with(name: str, suffix: str, change: Callable[[np.ndarray], np.ndarray]) -> LayoutCase:
    return dataclasses.replace(OF[name], write=with_tensor(OF[name].write, suffix, change))


def set_first(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(tensor: np.ndarray) -> np.ndarray:
        changed = tensor.copy()
        changed.flat[0] = value
        return changed

    return change


def load(layout: LayoutCase, folder: Path) -> None:
    write_quantized(case_of(layout), layout, folder)
    load_params(model_of(folder), folder, "loop")


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    with open_tensors(folder) as files:
        return {name: files.read(name, files.shape(name)).copy() for name in files.names}


@pytest.mark.parametrize(
    ("name", "suffix", "value", "problem"),
    [
        ("gptq", ".qzeros", 0x777777F7, "qzeros has zero points of 0, which AutoGPTQ writes over"),
        ("gptq_8_bits", ".qzeros", 0x7777FF77, "qzeros has zero points of 0, which AutoGPTQ writes over"),
        ("gptq_desc_act", ".g_idx", 99, "g_idx has groups from 0 to 99; there are"),
        ("gptq_desc_act", ".g_idx", -1, "g_idx has groups from -1 to"),
        ("w4a16_actorder", ".weight_g_idx", 99, "weight_g_idx has groups from 0 to 99; there are"),
        ("w4a16_actorder", ".weight_g_idx", -2, "weight_g_idx has groups from -2 to"),
        ("nvfp4", ".weight_global_scale", 0, "weight_global_scale is 0; it must be at least 1e-30"),
        ("nvfp4", ".weight_global_scale", 1e-31, "weight_global_scale is 1e-31; it must be at least 1e-30"),
        ("mxfp4", ".weight_scale", 255, "weight_scale has 1 exponents of 255, which encode no number"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(
    name: str, suffix: str, value: float, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match=problem) as refusal:
        load(layout_with(name, suffix, set_first(value)), tmp_path)
    assert "model.safetensors: tensor model.layers.0." in str(refusal.value)


def test_zero_points_of_symmetric_matrices_must_be_zero(tmp_path: Path) -> None:
    load(OF["w4a16_zeros"], tmp_path / "zeros")
    with pytest.raises(InvalidArgument, match=r"weight_zero_point has zero points, but symmetric is true"):
        load(layout_with("w4a16_zeros", ".weight_zero_point", set_first(1)), tmp_path / "others")


def test_numbers_of_a_matrix_that_is_read_may_not_be_left_over(tmp_path: Path) -> None:
    layout = layout_with("w8a8", ".weight_g_idx", lambda weight: np.zeros(weight.shape[1], np.int32))
    with pytest.raises(InvalidArgument, match=r"tensors are not part of LlamaForCausalLM .*weight_g_idx"):
        load(layout, tmp_path)


def test_matrices_that_order_their_groups_differently_are_kept_as_weights(tmp_path: Path) -> None:
    layout = OF["gptq_mixed_orders"]
    write_quantized(case_of(layout), layout, tmp_path)
    quantization = model_of(tmp_path).config.quantization
    assert quantization is not None
    layer = "model.layers.0"
    kept = [quantization.get_format(f"{layer}.self_attn.{name}_proj") is None for name in "qkvo"]
    assert kept == [True, True, True, False]


@pytest.mark.parametrize(
    ("more", "value"),
    [
        ({"sym": True}, 0x777777F7),  # AutoGPTQ's zeros are then all 8, whatever the scale
        ({"checkpoint_format": "gptq_v2"}, 0x777777F7),
        ({}, -0x08888889),  # the last one of a word writes over nothing
    ],
)
def test_zeros_that_nothing_was_lost_of_are_read(more: dict[str, object], value: int, tmp_path: Path) -> None:
    layout = layout_with("gptq", ".qzeros", set_first(value))
    load(dataclasses.replace(layout, config={**layout.config, **more}), tmp_path)


def test_the_output_matrix_is_named_where_a_config_does_not_say_that_it_is_quantized(tmp_path: Path) -> None:
    layout = OF["fp8_static"]
    write_quantized(case_of(layout), layout, tmp_path)
    stored = read_tensors(tmp_path)
    parts, _ = layout.write(stored.pop("lm_head.weight").astype(np.float32), np.random.default_rng(1))
    write_tensors({**stored, **{f"lm_head{suffix}": part for suffix, part in parts.items()}}, tmp_path)
    with pytest.raises(
        Unsupported,
        match=r"tensor lm_head\.input_scale: lm_head is quantized, but quant_method fp8 does not quantize it",
    ):
        load_params(model_of(tmp_path), tmp_path, "loop")


@pytest.mark.parametrize("name", ["k_proj.k_scale", "v_proj.v_scale", "kv_scale", "k_proj.output_scale"])
def test_scales_of_keys_and_values_are_without_effect(name: str, tmp_path: Path) -> None:
    layout = OF["w8a8"]
    write_quantized(case_of(layout), layout, tmp_path)
    scale = {f"model.layers.0.self_attn.{name}": np.ones(1, np.float32)}
    write_tensors({**read_tensors(tmp_path), **scale}, tmp_path)
    load_params(model_of(tmp_path), tmp_path, "loop")


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"k_proj.k_scale": 0.5, "v_proj.v_scale": 0.25}, (0.5, 0.25)),
        ({"k_scale": 0.5, "v_scale": 0.25, "q_scale": 9.0}, (0.5, 0.25)),
        ({"attn.k_scale": 0.5, "attn.v_scale": 0.25}, (0.5, 0.25)),
        ({"k_proj.output_scale": 0.5, "v_proj.output_scale": 0.25}, (0.5, 0.25)),
        ({"kv_scale": 0.5}, (0.5, 0.5)),
        ({"k_scale": 0.5}, (0.5, 0.5)),
    ],
)
def test_scales_of_the_kv_cache_are_read_by_layer(
    stored: dict[str, float], expected: tuple[float, float], tmp_path: Path
) -> None:
    write_checkpoint(tiny_case("llama_mha"), tmp_path)
    config = from_hf(read_json(tmp_path / "config.json"))
    scales = {f"model.layers.1.self_attn.{name}": np.full((1,), scale, np.float32) for name, scale in stored.items()}
    write_tensors({**read_tensors(tmp_path), **scales}, tmp_path)
    found = read_kv_scales(tmp_path, config, is_fp8=True)
    assert found is not None
    assert found[1].tolist() == list(expected)
    assert np.isnan(np.delete(found, 1, axis=0)).all()


@pytest.mark.parametrize(
    ("scale", "problem"),
    [
        (np.zeros(1, np.float32), "k_scale is 0.0; it must be above 0"),
        (np.ones(2, np.float32), "k_scale has 2 numbers; only one for all heads is supported"),
    ],
)
def test_scales_of_the_kv_cache_without_a_meaning_are_refused(
    scale: np.ndarray, problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tiny_case("llama_mha"), tmp_path)
    config = from_hf(read_json(tmp_path / "config.json"))
    write_tensors({**read_tensors(tmp_path), "model.layers.0.self_attn.k_scale": scale}, tmp_path)
    with pytest.raises((InvalidArgument, Unsupported), match=problem):
        read_kv_scales(tmp_path, config, is_fp8=True)
    with caplog.at_level("INFO"):
        assert read_kv_scales(tmp_path, config, is_fp8=False) is None
    assert "only used with --kv-cache-dtype fp8" in caplog.text


def test_scales_of_inputs_are_passed_over_where_rows_are_not_rounded(tmp_path: Path) -> None:
    layout = OF["fp8_static"]
    load(dataclasses.replace(layout, config={**layout.config, "dequantize": True}), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["dequantize"] is True


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        ("gptq", (8, 31), "the number of inputs is 31; its quantization packs them into words of 8"),
        ("gptq", (7, 32), "the number of outputs is 7; its quantization packs them into words of 8"),
        ("gptq_8_bits", (4, 30), "the number of inputs is 30; its quantization packs them into words of 4"),
        ("awq_part_of_a_word", (12, 32), "the number of outputs is 12; its quantization packs them into words of 8"),
        ("mxfp4", (8, 31), "the number of inputs is 31; its quantization packs them into words of 2"),
        ("nvfp4", (8, 31), "the number of inputs is 31; its quantization packs them into words of 2"),
    ],
)
def test_sizes_that_do_not_fill_words_are_refused(name: str, shape: tuple[int, int], problem: str) -> None:
    scheme, module = find_scheme({"quantization_config": OF[name].config}), "model.layers.0.mlp.down_proj"
    assert scheme is not None
    form = scheme.quantization.get_format(module)
    assert form is not None
    with pytest.raises(Unsupported, match=f"{module}: {problem}"):
        scheme.parts(module, shape, form)


def test_a_matrix_of_4_bits_need_not_fill_the_words_of_3_bits_of_others() -> None:
    config = {**OF["gptq"].config, "bits": 4, "dynamic": {r".*\.mlp\..*": {"bits": 3}}}
    scheme, module = find_scheme({"quantization_config": config}), "model.layers.0.self_attn.q_proj"
    assert scheme is not None
    form = scheme.quantization.get_format(module)
    assert form is not None
    assert scheme.parts(module, (40, 48), form)["qweight"].shapes == ((6, 40),)
    assert scheme.parts(module, (64, 64), form)["qweight"].shapes == ((6, 64), (8, 64))
