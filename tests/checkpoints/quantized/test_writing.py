"""`jpaged convert --quantize`: what is written is read back as what `--quantization` makes of the same weights."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from jpaged.checkpoints.conversion import ConversionOptions, convert_folder
from jpaged.checkpoints.hub import read_config, read_json
from jpaged.checkpoints.quantized.quantizer import quantized_here
from jpaged.checkpoints.weights import load_params
from jpaged.cli.main import main
from jpaged.errors import InvalidArgument
from jpaged.models.model import Model
from tests.checkpoints.quantized.layouts import LAYOUTS, write_quantized, write_tensors
from tests.models.tiny import tensors, tiny_case, write_checkpoint

FLOAT = np.dtype(np.float32)


@pytest.mark.parametrize(
    ("asked", "to"), [("int8", "safetensors"), ("int4", "safetensors"), ("fp8", "safetensors"), ("int4", "orbax")]
)
@pytest.mark.thinned(4)
def test_what_is_written_is_what_loading_would_make_of_it(asked: str, to, tmp_path: Path) -> None:
    source = write_checkpoint(tiny_case("llama_gqa_bias"), tmp_path / "source")
    convert_folder(source, tmp_path / "new", ConversionOptions(to, quantize=asked))
    written = Model(read_config(tmp_path / "new"), FLOAT)
    rounded = Model(quantized_here(read_config(source), asked), FLOAT)
    assert written.config.quantization is not None and written.config.quantization.method == "compressed-tensors"
    got, want = load_params(written, tmp_path / "new", "loop"), load_params(rounded, source, "loop")
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_checkpoint_that_was_saved_without_its_head_is_served_rounded(tmp_path: Path) -> None:
    """GPT-2 on the hub: the names of its tensors lack what those of its modules begin with."""
    case = tiny_case("gpt2")
    source = write_checkpoint(case, tmp_path / "source")
    write_tensors({name.removeprefix("transformer."): tensor for name, tensor in tensors(case).items()}, source)
    convert_folder(source, tmp_path / "new", ConversionOptions("safetensors", quantize="int4"))
    written = Model(read_config(tmp_path / "new"), FLOAT)
    rounded = Model(quantized_here(read_config(source), "int4"), FLOAT)
    got, want = load_params(written, tmp_path / "new", "loop"), load_params(rounded, source, "loop")
    jax.tree.map(np.testing.assert_array_equal, got, want)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), got)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), written.abstract_params("loop"))


def test_experts_in_one_tensor_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tiny_case("gpt_oss"), tmp_path / "source")
    assert main(["convert", str(source), str(tmp_path / "new"), "--to", "safetensors", "--quantize", "int4"]) != 0
    said = capsys.readouterr().err
    assert "model.layers.0.mlp.experts.gate_up_proj has the matrices of all experts in one tensor" in said
    assert "--quantization int4" in said
    assert not (tmp_path / "new").exists()


def test_what_is_left_is_listed_once(tmp_path: Path) -> None:
    source = write_checkpoint(tiny_case("qwen2_moe"), tmp_path / "source")
    convert_folder(source, tmp_path / "new", ConversionOptions("safetensors", quantize="int8"))
    config = read_json(tmp_path / "new" / "config.json")["quantization_config"]
    assert isinstance(config, dict)
    left = config["ignore"]
    assert "model.layers.0.mlp.gate" in left and len(left) == len(set(left))


def test_the_command_quantizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tiny_case("qwen3_tied"), tmp_path / "source")
    arguments = ["convert", str(source), str(tmp_path / "new"), "--to", "safetensors", "--quantize"]
    assert main([*arguments, "int4"]) == 0
    config = read_json(tmp_path / "new" / "config.json")["quantization_config"]
    assert isinstance(config, dict) and config["format"] == "pack-quantized" and config["ignore"] == ["lm_head"]
    # Depths of 48, 88 and 256 have groups of the largest part of 128 that divides them.
    sizes = {group["weights"]["group_size"] for group in config["config_groups"].values()}
    assert sizes == {8, 16, 128}
    again = ["convert", str(tmp_path / "new"), str(tmp_path / "newer"), "--to", "safetensors", "--quantize", "int8"]
    assert main(again) != 0
    assert "--quantize: is int8, but the checkpoint is already quantized" in capsys.readouterr().err


@pytest.mark.long
def test_a_quantized_checkpoint_is_copied_as_it_is(tmp_path: Path) -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == "fp8_channel")
    write_quantized(tiny_case("llama_mha"), layout, tmp_path / "source")
    model = Model(read_config(tmp_path / "source"), FLOAT)
    convert_folder(tmp_path / "source", tmp_path / "orbax", ConversionOptions("orbax"))
    got = load_params(model, tmp_path / "orbax", "loop")
    jax.tree.map(np.testing.assert_array_equal, got, load_params(model, tmp_path / "source", "loop"))
    with pytest.raises(InvalidArgument, match="dtype: bfloat16 cannot be applied to quantized weights"):
        convert_folder(tmp_path / "source", tmp_path / "cast", ConversionOptions("safetensors", dtype="bfloat16"))
    assert not (tmp_path / "cast").exists()
