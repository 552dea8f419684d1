"""The experts of gpt-oss as they are shipped: blocks of 32 numbers of 4 bits, and a power of two for each."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.weights import load_params
from jpaged.kernels.matmul.quantized import QuantizedMatrix, dequantize
from jpaged.models.model import Model
from tests.checkpoints.quantized.layouts import E2M1, write_tensors
from tests.models import dense
from tests.models.tiny import tensors, tiny_case

LEFT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def test_experts_of_gpt_oss_have_the_numbers_that_were_shipped(tmp_path: Path) -> None:
    case, rng = tiny_case("gpt_oss"), np.random.default_rng(8)
    stored: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    # As wide as two blocks: the tiny checkpoint's experts are of another width.
    config = {**case.config, "intermediate_size": 64}
    shapes = {"gate_up_proj": (4, 64, 128), "gate_up_proj_bias": (4, 128), "down_proj": (4, 64, 64)}
    for name, tensor in tensors(case).items():
        shape = shapes.get(name.rpartition(".")[2], tensor.shape) if "experts" in name else tensor.shape
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = plain[name] = np.resize(tensor, shape)
            continue
        num_experts, depth, num_out = shape
        codes = rng.integers(0, 16, (num_experts, num_out, depth // 32, 32)).astype(np.uint8)
        exponents = rng.integers(122, 126, codes.shape[:3]).astype(np.uint8)
        stored[f"{name}_blocks"] = codes[..., 0::2] | (codes[..., 1::2] << 4)
        stored[f"{name}_scales"] = exponents
        weights = E2M1[codes] * np.exp2(exponents.astype(np.float32) - 127)[..., None]
        plain[name] = np.ascontiguousarray(weights.reshape(num_experts, num_out, depth).swapaxes(1, 2))
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": LEFT}
    for folder, held, more in (("mxfp4", stored, {"quantization_config": quantization}), ("plain", plain, {})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps({**config, **more}), encoding="utf-8")
        write_tensors(held, tmp_path / folder)
    models = {name: Model(read_config(tmp_path / name), np.dtype(np.float32)) for name in ("mxfp4", "plain")}
    params = {name: load_params(model, tmp_path / name, "loop") for name, model in models.items()}
    for part in ("gate", "up", "down"):
        got, want = (params[name]["layers"][0]["mlp"]["experts"][part]["kernel"] for name in ("mxfp4", "plain"))
        assert isinstance(got, QuantizedMatrix)
        np.testing.assert_array_equal(dequantize(got), want)
    ids = np.arange(3, 27, dtype=np.int32) * 5 % 131
    got, want = (np.asarray(dense.logits(models[name], params[name], ids, len(ids))) for name in ("mxfp4", "plain"))
    np.testing.assert_allclose(got, want, rtol=0, atol=np.abs(want).max() * 1e-4)
