"""Quantized checkpoints as one CPU device multiplies them: packed, with the numbers that were published."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jpaged.checkpoints.weights import load_params
from jpaged.device.linear import pack_params
from jpaged.kernels import matmul
from tests.checkpoints.quantized.layouts import LAYOUTS, write_quantized
from tests.checkpoints.quantized.test_layouts import case_of, logits, model_of, write_plain

NAMES = ("gptq_desc_act", "awq", "w8a8", "w8a8_static", "w4a16_asymmetric", "deepseek_fp8", "mxfp4", "nvfp4")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.thinned(3)
def test_what_is_packed_computes_what_the_weights_do(name: str, tmp_path: Path) -> None:
    """Rows of int8 are those that XLA makes; rows of fp8 stay as they are, which is nearer to the weights."""
    layout = next(layout for layout in LAYOUTS if layout.name == name)
    plain = write_quantized(case_of(layout), layout, tmp_path / "quantized")
    folder = write_plain(case_of(layout), plain, tmp_path / "plain")
    model = model_of(tmp_path / "quantized")
    if name.startswith("w8a8"):
        want = logits(model, load_params(model, tmp_path / "quantized", "loop"))
    else:
        reference = model_of(folder)
        want = logits(reference, load_params(reference, folder, "loop"))
    packer = matmul.loaded().packer(SingleDeviceSharding(jax.devices()[0]))
    packed = pack_params(load_params(model, tmp_path / "quantized", "loop"), model.config, packer)
    assert all(isinstance(layer["mlp"]["down"]["kernel"], matmul.PackedMatrix) for layer in packed["layers"])
    np.testing.assert_allclose(logits(model, packed), want, rtol=0, atol=1e-5 * np.abs(want).max())
