"""The experts of gpt-oss as they are shipped: blocks of 32 numbers of 4 bits, and a power of two for each.

Matrices of bitsandbytes, whose 4 bits are indices of a table.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.weights import load_params
from jpaged.errors import InvalidArgument
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


def _four_bits(weight: np.ndarray, *, is_nested: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of a matrix as bitsandbytes stores it, by suffixes, and its weights."""
    rng, size = np.random.default_rng(weight.size), 64
    table = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
    absmax = np.abs(weight.reshape(-1, size)).max(1)
    state = {"quant_type": "nf4", "blocksize": size, "dtype": "float16", "shape": list(weight.shape)}
    parts = {".quant_map": table, ".absmax": absmax}
    if is_nested:
        nested, outer = rng.uniform(-1, 1, 256).astype(np.float32), np.full(-(-len(absmax) // 256), 0.5, np.float32)
        indices = rng.integers(0, 256, len(absmax)).astype(np.uint8)
        absmax = nested[indices] * np.float32(0.5) + np.float32(0.25)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
        parts |= {".absmax": indices, ".nested_absmax": outer, ".nested_quant_map": nested}
    codes = rng.integers(0, 16, weight.size).astype(np.uint8)
    parts[""] = (codes[0::2] << 4 | codes[1::2])[:, None]
    parts[".quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    weights = table[codes].reshape(-1, size) * absmax[:, None]
    return parts, weights.reshape(weight.shape).astype(np.float16)


def test_matrices_of_bitsandbytes_become_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny = tiny_case("llama_mha")
    case = dataclasses.replace(tiny, config={**tiny.config, "num_hidden_layers": 1})
    stored, plain, kinds = {}, {}, {"q_proj": "nf4", "k_proj": "nested", "down_proj": "int8"}
    for name, tensor in tensors(case).items():
        kind = next((kind for part, kind in kinds.items() if f".{part}." in name), "")
        if kind == "int8":
            scales = np.abs(tensor).max(1)
            stored[name] = np.rint(tensor / scales[:, None] * 127).astype(np.int8)
            stored |= {name.replace("weight", "SCB"): scales, name + "_format": np.zeros((), np.uint8)}
            plain[name] = stored[name].astype(np.float32) * (scales / 127)[:, None]
        elif kind:
            parts, plain[name] = _four_bits(tensor, is_nested=kind == "nested")
            stored |= {name + end: part for end, part in parts.items()}
        else:
            stored[name] = plain[name] = tensor
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
    for folder, held, more in (("bnb", stored, {"quantization_config": config}), ("plain", plain, {})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps({**case.config, **more}), encoding="utf-8")
        write_tensors(held, tmp_path / folder)
    with caplog.at_level("INFO", "jpaged.checkpoints.weights"):
        params = [
            load_params(Model(read_config(tmp_path / name), np.dtype(np.float32)), tmp_path / name, "loop")
            for name in ("bnb", "plain")
        ]
    jax.tree.map(np.testing.assert_array_equal, *params)
    assert "3 matrices of bitsandbytes become weights of the served type" in caplog.text
    stored["model.layers.0.self_attn.q_proj.weight.absmax"] = np.ones(3, np.float32)
    write_tensors(stored, tmp_path / "bnb")
    with pytest.raises(InvalidArgument, match=r"q_proj\.weight has \d+ bytes and 3 blocks; its state describes"):
        load_params(Model(read_config(tmp_path / "bnb"), np.dtype(np.float32)), tmp_path / "bnb", "loop")
