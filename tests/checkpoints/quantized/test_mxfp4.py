"""The experts of gpt-oss as they are shipped: blocks of 32 numbers of 4 bits, and a power of two for each.

Matrices of bitsandbytes, whose 4 bits are indices of a table.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.quantized.floats import BitsAndBytesTensors
from jpaged.checkpoints.quantized.quantizer import quantized_here
from jpaged.checkpoints.tensor_files import TensorFiles
from jpaged.checkpoints.weights import load_params
from jpaged.errors import InvalidArgument, JpagedError
from jpaged.kernels.matmul.quantized import QuantizedMatrix, dequantize
from jpaged.models.model import Model
from tests.checkpoints.quantized.layouts import E2M1, write_tensors
from tests.models import dense
from tests.models.tiny import tensors, tiny_case

LEFT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@pytest.mark.long
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
    with pytest.raises(InvalidArgument, match=r"q_proj\.weight\.absmax is float32 \[3\]; it must be float32 or"):
        load_params(Model(read_config(tmp_path / "bnb"), np.dtype(np.float32)), tmp_path / "bnb", "loop")


def test_the_option_may_name_bitsandbytes(tmp_path: Path) -> None:
    config: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    for more in ({"quantization_config": config}, {}):
        (tmp_path / "config.json").write_text(json.dumps({**tiny_case("llama_mha").config, **more}), encoding="utf-8")
        found = read_config(tmp_path)
        rounded = quantized_here(found, "int8")
        assert rounded.quantization is not None and rounded.quantization.method == "int8"
        if more:
            assert quantized_here(found, "bitsandbytes") is found
            with pytest.raises(InvalidArgument, match="is awq, but the checkpoint is quantized with bitsandbytes"):
                quantized_here(found, "awq")
        else:
            with pytest.raises(InvalidArgument, match="is bitsandbytes, but the checkpoint is not quantized"):
                quantized_here(found, "bitsandbytes")


def _state(**changes: object) -> Callable[[dict[str, np.ndarray]], None]:
    """Return an edit of the description of a matrix of four bits; None removes a value."""

    def edit(stored: dict[str, np.ndarray]) -> None:
        name = "m.weight.quant_state.bitsandbytes__nf4"
        state = {**json.loads(stored[name].tobytes()), **changes}
        text = json.dumps({key: value for key, value in state.items() if value is not None})
        stored[name] = np.frombuffer(text.encode(), np.uint8)

    return edit


def _with(name: str, tensor: np.ndarray) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda stored: stored.update({name: tensor})


def _without(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    def edit(stored: dict[str, np.ndarray]) -> None:
        del stored[name]

    return edit


def _read_all(files: BitsAndBytesTensors) -> None:
    for name in sorted(files.names):
        files.read(name, files.shape(name))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_state(nested_blocksize=None), "bitsandbytes__nf4 nested_blocksize: is missing"),
        (_state(nested_offset=None), "bitsandbytes__nf4 nested_offset: is missing"),
        (_state(nested_blocksize=0), "nested_blocksize: is 0; it must be an integer of at least 1"),
        (_state(nested_blocksize=1 << 40), "nested_blocksize: is 1099511627776; the limit is 2147483647"),
        (_state(nested_offset="x"), "nested_offset: is 'x'; it must be a finite number"),
        (_state(shape="x"), "shape: is 'x'; it must be a list of numbers above 0"),
        (_state(dtype="int8"), "dtype: is 'int8'; supported: float64"),
        (_with("m.weight.quant_state.bitsandbytes__nf4", np.full(99999, ord("["), np.uint8)), "is not JSON: maximum"),
        (_with("m.weight.quant_state.bitsandbytes__nf4", np.array([ord("3")], np.uint8)), "is a int; it must be an"),
        (_with("m.weight", np.ones((9, 1), np.uint8)), "m.weight has 9 bytes; its state describes 256"),
        (_with("m.weight.absmax", np.ones(8, np.float32)), r"absmax is float32 \[8\]; it must be uint8 \[8\], because"),
        (_with("m.weight.quant_map", np.ones(1, np.float32)), r"quant_map is float32 \[1\]; it must be .* \[16\]"),
        (_with("m.weight.nested_quant_map", np.ones(2, np.float32)), r"nested_quant_map is .*; it must be .* \[256\]"),
        (_with("m.weight.nested_absmax", np.ones(2, np.float32)), r"nested_absmax is .*; it must be .* \[1\]"),
        (_without("m.weight.nested_absmax"), r"m.weight.nested_absmax is missing"),
        (_with("i.SCB", np.ones(1, np.float32)), r"i.SCB is float32 \[1\]; it must be .* \[4\]"),
        (_with("i.SCB", np.ones((4, 1), np.float32)), r"i.SCB is float32 \[4, 1\]; it must be .* \[4\]"),
        (_with("i.weight", np.ones((4, 8), np.float16)), "i.weight is float16; it must be int8, because SCB"),
        (_with("i.weight_format", np.array(2, np.uint8)), "i.weight_format is 2; only 0, the order of rows"),
    ],
)
def test_a_matrix_of_bitsandbytes_that_is_described_wrongly_is_refused(
    edit: Callable[[dict[str, np.ndarray]], None], message: str, tmp_path: Path
) -> None:
    parts, _ = _four_bits(np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32), is_nested=True)
    stored = {f"m.weight{end}": part for end, part in parts.items()}
    stored |= {"i.weight": np.ones((4, 8), np.int8), "i.SCB": np.ones(4, np.float32)}
    edit(stored)
    write_tensors(stored, tmp_path)
    with ExitStack() as opened, pytest.raises(JpagedError, match=message):
        _read_all(BitsAndBytesTensors(TensorFiles(tmp_path, opened)))


def test_a_block_of_bitsandbytes_may_be_larger_than_its_matrix(tmp_path: Path) -> None:
    parts, want = _four_bits(np.random.default_rng(1).normal(size=(1, 64)).astype(np.float32), is_nested=False)
    stored = {f"m.weight{end}": part for end, part in parts.items()}
    _state(blocksize=1 << 30)(stored)
    write_tensors(stored, tmp_path)
    with ExitStack() as opened:
        got = BitsAndBytesTensors(TensorFiles(tmp_path, opened)).read("m.weight", (1, 64))
    np.testing.assert_array_equal(got, want)
