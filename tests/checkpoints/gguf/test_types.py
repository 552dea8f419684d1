"""Matrices of every type are kept as they are, or become the weights that the `gguf` package makes of them."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest

from jpaged.checkpoints.gguf.blocks import BLOCK_TYPES, PACKED_TYPES, joint_form
from jpaged.checkpoints.gguf.file import open_gguf
from jpaged.checkpoints.gguf.tensors import read_model
from jpaged.checkpoints.hub import find_folder, read_config, read_scheme
from jpaged.checkpoints.names import model_leaves
from jpaged.checkpoints.weights import check_tensors, load_params, open_tensors
from jpaged.device.linear import LeafPacker, pack_params
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.kernels import matmul
from jpaged.kernels.matmul.quantized import QuantizedMatrix, dequantize
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.models.hf_config import from_hf
from jpaged.models.layers import Params
from jpaged.models.model import Model
from tests.checkpoints.gguf.files import Kinds, checkpoint, of_kind, write_gguf, write_plain
from tests.device.sharded import place
from tests.models import dense

FLOAT = np.dtype(np.float32)
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
# What a matrix of each type is kept in: values and numbers that share a scale; None is weights.
KEPT = {
    "F32": None,
    "F16": None,
    "BF16": None,
    "Q8_0": ("int8", 32),
    "Q4_0": ("int4", 32),
    "Q4_1": ("int4", 32),
    "Q5_0": ("int8", 32),
    "Q5_1": ("int8", 32),
    "Q4_K": ("int4", 32),
    "Q5_K": ("int8", 32),
    "Q6_K": ("int8", 16),
}
# Bytes of a block at which the scale and the least number are.
HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2)} | {
    **dict.fromkeys(("Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
}


def mixed(name: str, shape: tuple[int, ...]) -> str:
    """Types as llama.cpp mixes them: better ones for values and for what leads back in some layers."""
    if len(shape) == 1:
        return "F32"
    if name in ("output.weight", "token_embd.weight"):
        return "Q6_K"
    return "Q6_K" if "attn_v" in name or name == "blk.0.ffn_down.weight" else "Q4_K"


def without_scales(data: np.ndarray) -> np.ndarray:
    """Blocks of Q4_K, of which some groups have a least number alone, and some nothing."""
    blocks = data.reshape(-1, 144).copy()
    blocks[::2, 4:8] &= 0xC0  # the scales of four groups
    blocks[1::4, :2] = 0  # those of all
    blocks[3::4, :4] = 0
    return blocks.reshape(data.shape)


def write_both(kinds: Kinds, folder: Path) -> tuple[Path, Path]:
    """A Llama with matrices of types, and what they stand for as Hugging Face's libraries have it."""
    config, tensors = checkpoint("llama_mha", **WIDE, **HEADS)
    plain = write_gguf((config, tensors), folder / "model.gguf", kinds)
    return folder / "model.gguf", write_plain(config, plain, folder / "plain")


def load(path: Path) -> tuple[Model, Params]:
    model = Model(read_config(path), FLOAT)
    return model, load_params(model, path, "loop")


def is_quantized(leaf: object) -> bool:
    return isinstance(leaf, QuantizedMatrix)


def quantized(params: Params) -> list[QuantizedMatrix]:
    return [leaf for leaf in jax.tree.leaves(params, is_leaf=is_quantized) if is_quantized(leaf)]


@pytest.mark.parametrize("name", ["lfm2", "glm4"])
def test_matrices_of_other_layouts_stay_quantized(name: str, tmp_path: Path) -> None:
    config, tensors = checkpoint(name)
    width = 96  # of the feed-forward, in whole blocks
    config["intermediate_size"] = width * 3 // 2 if name == "lfm2" else width
    tensors = {key: resized(tensor, width) for key, tensor in tensors.items()}
    file = tmp_path / "model.gguf"
    plain = write_gguf(
        (config, tensors), file, lambda key, shape: of_kind("Q8_0")(key.replace("conv.conv", "norm"), shape)
    )
    model, params = load(file)
    assert_same_weights(params, load(write_plain(config, plain, tmp_path / "plain"))[1])
    assert len(quantized(params)) == {"lfm2": 5 * 4 + 1, "glm4": 3 * 4 + 2}[name]
    packer = matmul.loaded().packer(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    found = load_params(model, file, "loop", pack_stored=LeafPacker(packer, model.config).pack_stored)
    want = pack_params(params, model.config, packer)
    jax.tree.map(np.testing.assert_array_equal, pack_params(found, model.config, packer), want)


@pytest.mark.parametrize(("value_dim", "num_kept"), [(32, 22), (8, 19)])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_columns_in_another_order_stay_quantized_if_groups_are_whole(
    kind: str, value_dim: int, num_kept: int, tmp_path: Path
) -> None:
    """The output projection of the delta rule has the value heads of the file as its columns."""
    config, tensors = checkpoint("qwen3_5_text")
    config |= {"intermediate_size": 96, "linear_value_head_dim": value_dim}
    tensors = {key: resized(with_value_heads(key, tensor, value_dim), 96) for key, tensor in tensors.items()}

    def choose(key: str, shape: tuple[int, ...]) -> str:
        return of_kind(kind)(key.replace("conv1d", "norm"), shape)

    plain = write_gguf((config, tensors), tmp_path / "model.gguf", choose)
    model, params = load(tmp_path / "model.gguf")
    assert_same_weights(params, load(write_plain(config, plain, tmp_path / "plain"))[1])
    assert len(quantized(params)) == num_kept
    packer = matmul.loaded().packer(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    stored = LeafPacker(packer, model.config).pack_stored
    found = load_params(model, tmp_path / "model.gguf", "loop", pack_stored=stored)
    jax.tree.map(
        np.testing.assert_array_equal,
        pack_params(found, model.config, packer),
        pack_params(params, model.config, packer),
    )


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_experts_of_gemma4_keep_their_blocks(kind: str, tmp_path: Path) -> None:
    config, _ = checkpoint("gemma4_moe")
    config |= {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 96}
    leaves, rng = model_leaves(from_hf(config), ["model.embed_tokens.weight"]), np.random.default_rng(0)
    shapes = {name: shape for each in (leaves.outer, *leaves.layers) for leaf in each for name, shape in leaf.tensors}
    tensors = {name: rng.standard_normal(shape, np.float32) / 8 for name, shape in shapes.items()}

    def choose(name: str, shape: tuple[int, ...]) -> str:
        return of_kind(kind)(name.replace("scale", "norm"), shape)

    plain = write_gguf((config, tensors), tmp_path / "model.gguf", choose)
    _, params = load(tmp_path / "model.gguf")
    assert len(quantized(params)) == 6 * 7 + 1
    assert_same_weights(params, load(write_plain(config, plain, tmp_path / "plain"))[1])


def with_value_heads(name: str, tensor: np.ndarray, dim: int) -> np.ndarray:
    """A tensor of the delta rule with another width of its value heads, 8 of 8, as columns or after 128 rows."""
    if name.endswith("linear_attn.norm.weight"):
        return np.resize(tensor, dim)
    if name.endswith("out_proj.weight"):
        return np.resize(tensor, (len(tensor), 8 * dim))
    if re.search(r"in_proj_(qkv|z)|conv1d", name):
        first = len(tensor) - 64
        return np.concatenate([tensor[:first], np.resize(tensor, (8 * dim, *tensor.shape[1:]))])
    return tensor


def resized(tensor: np.ndarray, width: int) -> np.ndarray:
    """A matrix with its feed-forward axis, of 80 or 88 numbers, or twice 88, repeated up to a width."""
    for axis, size in enumerate(tensor.shape):
        if size in (80, 88, 2 * 88):
            wanted = width * (2 if size == 2 * 88 else 1)
            return np.take(tensor, np.arange(wanted) % size, axis)
    return tensor


def size(leaf: QuantizedMatrix) -> float:
    """Bytes of a matrix; two int4 or float4 make a byte."""
    others = [each.nbytes for each in (leaf.scales, leaf.zeros) if each is not None]
    return leaf.values.size * (1 if leaf.values.dtype == np.int8 else 0.5) + sum(others)


def assert_same_weights(params: Params, wanted: Params) -> None:
    weights = jax.tree.map(lambda leaf: dequantize(leaf) if is_quantized(leaf) else leaf, params, is_leaf=is_quantized)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), weights, wanted)


def assert_same_logits(got: tuple[Model, Params], want: tuple[Model, Params]) -> None:
    ids = np.arange(3, 27, dtype=np.int32) * 5 % 131
    a, b = (np.asarray(dense.logits(model, params, ids, len(ids), "loop")) for model, params in (got, want))
    np.testing.assert_allclose(a[:, : b.shape[1]], b, rtol=0, atol=np.abs(b).max() * 2e-5)


@pytest.mark.parametrize("kind", KEPT)
def test_a_type_has_the_weights_of_its_blocks(kind: str, tmp_path: Path) -> None:
    file, folder = write_both(of_kind(kind), tmp_path)
    (model, params), (_, wanted) = load(file), load(folder)
    assert_same_weights(params, wanted)
    kept = {(leaf.values.dtype.name, leaf.group_size) for leaf in quantized(params)}
    assert kept == (set() if KEPT[kind] is None else {KEPT[kind]})
    assert len(quantized(params)) == (0 if KEPT[kind] is None else 2 * 4 + 2)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), model.abstract_params("loop"))


@pytest.mark.parametrize("kinds", [*map(of_kind, PACKED_TYPES), mixed])
def test_matrices_packed_from_the_file_have_the_bits_of_decoded_and_packed_ones(kinds: Kinds, tmp_path: Path) -> None:
    data = checkpoint("llama_mha", **{**WIDE, "num_hidden_layers": 1}, **HEADS)
    file = tmp_path / "model.gguf"
    write_gguf(data, file, kinds)
    model = Model(read_config(file), FLOAT)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    packer = matmul.loaded().packer(sharding, rounds_rows=True)
    found = load_params(model, file, "loop", pack_stored=LeafPacker(packer, model.config).pack_stored)
    assert not quantized(found)
    want = pack_params(load_params(model, file, "loop"), model.config, packer)
    jax.tree.map(np.testing.assert_array_equal, found, want)  # of the same structure


@pytest.mark.parametrize(
    ("kinds", "want"),
    [
        (("Q5_0", "Q5_0"), MatrixFormat("int8", 32, num_bits=5, has_half_scales=True)),
        (("Q5_0", "Q8_0"), MatrixFormat("int8", 32, has_half_scales=True)),
        (("Q4_0", "Q5_0"), MatrixFormat("int8", 32, num_bits=5, has_half_scales=True)),
        (("Q4_K", "Q6_K"), MatrixFormat("int8", 16, has_zeros=True, has_whole_zeros=False, num_bits=6)),
        (("MXFP4", "MXFP4"), MatrixFormat("mxfp4", 32)),
        (("MXFP4", "Q8_0"), MatrixFormat("int8", 32)),
        (("IQ2_XS", "TQ2_0"), MatrixFormat("int8", 16)),
        (("Q4_0", "Q4_1"), MatrixFormat("int4", 32, has_zeros=True, has_whole_zeros=False, has_half_scales=True)),
    ],
)
def test_the_format_of_several_types_holds_the_numbers_of_all(kinds: tuple[str, ...], want: MatrixFormat) -> None:
    assert joint_form([BLOCK_TYPES[kind].form for kind in kinds]) == want


def random_blocks(kind: str, num_blocks: int) -> np.ndarray:
    """Blocks of random bytes, with finite scales."""
    rng, block = np.random.default_rng(len(kind)), BLOCK_TYPES[kind]
    blocks = rng.integers(0, 256, (num_blocks, block.num_bytes), np.uint8)
    scales = rng.uniform(0.5e-3, 2e-3, (num_blocks, 1)).astype(np.float16)
    for at in block.halves or ():
        blocks[:, at : at + 2] = scales.view(np.uint8)
    if kind == "IQ1_M":
        words = blocks[:, 48:].copy().view(np.uint16)
        quarters = scales.view(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16) & 15
        blocks[:, 48:] = (words & 0xFFF | quarters << 12).view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_have_the_weights_of_the_package(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jpaged.checkpoints.gguf.blocks._STRIP_BLOCKS", 10)
    block, data = BLOCK_TYPES[kind], random_blocks(kind, 48).reshape(6, -1)
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == (block.size, block.num_bytes)
    want = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]).astype(np.float32)
    matrix = block.matrix(data, block.form)
    assert block.is_finite(data)
    assert (matrix.values.dtype, matrix.group_size) == (block.form.dtype, block.form.group_size)
    assert np.abs(matrix.values.astype(np.float32)).max() <= block.form.largest + 1
    if block.form.has_zeros:
        np.testing.assert_allclose(matrix.weights(), want, rtol=1e-6, atol=np.abs(want).max() * 2e-7)
    else:
        np.testing.assert_array_equal(matrix.weights(), want)


def test_a_scale_in_parts_that_is_not_finite_is_found() -> None:
    blocks = random_blocks("IQ1_M", 4)
    words = blocks[:, 48:].view(np.uint16)
    words[2] = words[2] & 0xFFF | (np.float16(np.inf).view(np.uint16) >> np.arange(0, 16, 4) & 15) << 12
    blocks[:, 48:] = words.view(np.uint8)
    assert BLOCK_TYPES["IQ1_M"].is_finite(blocks[:2])
    assert not BLOCK_TYPES["IQ1_M"].is_finite(blocks)


def few_bits(name: str, shape: tuple[int, ...]) -> str:
    """A type of few bits for each matrix of a layer; queries, keys and values have several."""
    kinds = {"attn_q": "IQ2_XS", "attn_k": "Q2_K", "attn_v": "Q4_K", "attn_output": "IQ3_S", "ffn_gate": "MXFP4"}
    kinds |= {"ffn_up": "MXFP4", "ffn_down": "TQ2_0", "output": "Q3_K", "token_embd": "IQ4_NL"}
    return kinds[name.removeprefix("blk.0.").removesuffix(".weight")] if len(shape) > 1 else "F32"


def test_types_of_few_bits_become_wider_ones_at_a_logged_cost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, tensors = checkpoint("llama_mha", **{**WIDE, "num_hidden_layers": 1}, **HEADS)
    file = tmp_path / "model.gguf"
    plain = write_gguf((config, tensors), file, few_bits)
    with caplog.at_level("INFO", "jpaged.checkpoints.weights"):
        model, params = load(file)
    assert_same_weights(params, load(write_plain(config, plain, tmp_path / "plain"))[1])
    (line,) = [record.getMessage() for record in caplog.records if "no kernel" in record.getMessage()]
    assert f"{file}: IQ2_XS, IQ3_S, IQ4_NL, MXFP4, Q2_K, Q3_K, TQ2_0: " in line
    qkv = params["layers"][0]["attention"]["qkv"]["kernel"]
    num_bytes = sum(map(size, quantized(params))) - size(qkv) * HEADS["num_key_value_heads"] / 8  # values are Q4_K
    assert f" take up to {num_bytes / 2**20:.1f} MiB in memory" in line
    packer = matmul.loaded().packer(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    stored = LeafPacker(packer, model.config).pack_stored
    packed = load_params(model, file, "loop", pack_stored=stored)
    want = pack_params(params, model.config, packer)
    jax.tree.map(np.testing.assert_array_equal, pack_params(packed, model.config, packer), want)


@pytest.mark.parametrize("kind", HALVES)
def test_a_scale_that_is_not_finite_is_found_while_a_matrix_is_packed(kind: str, tmp_path: Path) -> None:
    data = checkpoint("llama_mha", **{**WIDE, "num_hidden_layers": 1}, **HEADS)
    file = tmp_path / "model.gguf"
    write_gguf(data, file, of_kind(kind))
    model = Model(read_config(file), FLOAT)
    packer = matmul.loaded().packer(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    stored = open_gguf(file).tensors["blk.0.ffn_up.weight"]
    bad_row, contents = 37, bytearray(file.read_bytes())
    at = stored.begin + bad_row * stored.stored_shape[-1] + HALVES[kind][-1]
    contents[at : at + 2] = np.float16(np.inf).tobytes()
    file.write_bytes(contents)
    with pytest.raises(InvalidArgument, match=r"up_proj\.weight has block scales that are not finite"):
        load_params(model, file, "loop", pack_stored=LeafPacker(packer, model.config).pack_stored)


def test_an_embedding_that_is_not_multiplied_as_it_is_becomes_weights(tmp_path: Path) -> None:
    file, folder = write_both(of_kind("Q8_0"), tmp_path)
    config = read_config(file)
    assert config.quantization is not None
    dense_embedding = dataclasses.replace(config.quantization, has_embedding=False)
    model = Model(dataclasses.replace(config, quantization=dense_embedding), FLOAT)
    params, (_, wanted) = load_params(model, file, "loop"), load(folder)
    assert_same_weights(params, wanted)
    assert not is_quantized(params["embed"]["embedding"])
    assert is_quantized(params["lm_head"]["embedding"])


def test_matrices_of_one_leaf_get_the_form_that_holds_them_all(tmp_path: Path) -> None:
    file, folder = write_both(mixed, tmp_path)
    (_, params), (_, wanted) = load(file), load(folder)
    assert_same_weights(params, wanted)
    first, second = params["layers"]
    forms = [
        (leaf.values.dtype.name, leaf.group_size)
        for leaf in (first["attention"]["qkv"]["kernel"], first["attention"]["out"]["kernel"])
    ]
    assert forms == [("int8", 16), ("int4", 32)]
    downs = [layer["mlp"]["down"]["kernel"].values.dtype.name for layer in (first, second)]
    assert downs == ["int8", "int4"]


def test_a_group_without_a_scale_is_its_least_number() -> None:
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (64, 4 * 144), np.uint8).reshape(-1, 144)
    blocks[:, :4] = np.array([1e-3, 2e-3], np.float16).view(np.uint8)
    data = without_scales(blocks).reshape(64, -1)
    want = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.Q4_K)
    for form in (BLOCK_TYPES["Q4_K"].form, MatrixFormat("int8", 16, has_zeros=True, has_whole_zeros=False)):
        matrix = BLOCK_TYPES["Q4_K"].matrix(data, form)
        np.testing.assert_allclose(matrix.weights(), want, rtol=1e-6, atol=1e-7)
    assert (want == 0).any()
    assert len(np.unique(want[0, :32])) == 1


@pytest.mark.parametrize(("kind", "at"), [(kind, at) for kind, offsets in HALVES.items() for at in offsets])
@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_a_scale_or_a_least_that_is_no_number_is_refused(kind: str, at: int, number: float, tmp_path: Path) -> None:
    model = checkpoint("llama_mha", **WIDE | HEADS | {"num_hidden_layers": 1})
    file = tmp_path / "model.gguf"
    write_gguf(model, file, lambda name, shape: kind if name == "blk.0.ffn_down.weight" else "F32")
    stored = next(each for each in gguf.GGUFReader(file, "r+").tensors if each.name == "blk.0.ffn_down.weight")
    stored.data[3, at : at + 2] = np.array([number], np.float16).view(np.uint8)
    message = r"model.gguf: tensor model.layers.0.mlp.down_proj.weight has block scales that are not finite"
    with pytest.raises(InvalidArgument, match=message):
        load(file)


def test_experts_keep_the_blocks_of_their_stack(tmp_path: Path) -> None:
    model = checkpoint("mixtral", hidden_size=64, intermediate_size=88)
    kinds = {"ffn_gate_exps": "Q8_0", "ffn_up_exps": "Q4_0"}
    plain = write_gguf(model, tmp_path / "model.gguf", lambda name, shape: kinds.get(name.split(".")[-2], "F32"))
    folder = write_plain(model[0], plain, tmp_path / "plain")
    (_, params), (_, wanted) = load(tmp_path / "model.gguf"), load(folder)
    assert_same_weights(params, wanted)
    kept = [each["mlp"]["experts"] for each in params["layers"]]
    assert {each["gate"]["kernel"].values.dtype.name for each in kept} == {"int8"}
    assert {each["up"]["kernel"].values.dtype.name for each in kept} == {"int4"}
    assert not any(is_quantized(each["down"]["kernel"]) for each in kept)


def gpt_oss() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """gpt-oss with experts of whole blocks."""
    config, tensors = checkpoint("gpt_oss")
    config["intermediate_size"] = 64
    wide = {48: 64, 96: 128}
    for name in (name for name in tensors if ".experts." in name):
        for axis, size in enumerate(tensors[name].shape):
            tensors[name] = np.take(tensors[name], np.arange(wide.get(size, size)) % size, axis)
    return config, tensors


@pytest.mark.long
@pytest.mark.parametrize("up", ["MXFP4", "Q8_0"])
def test_experts_of_gpt_oss_keep_their_blocks_if_gates_and_ups_have_one_type(up: str, tmp_path: Path) -> None:
    model, kinds = gpt_oss(), {"ffn_gate_exps": "MXFP4", "ffn_up_exps": up, "ffn_down_exps": "MXFP4"}

    def kind(name: str, shape: tuple[int, ...]) -> str:
        return kinds.get(name.split(".")[-2], "Q8_0") if len(shape) > 1 and name.endswith("weight") else "F32"

    plain = write_gguf(model, tmp_path / "model.gguf", lambda name, shape: kind(name.replace("gate_inp.", "."), shape))
    got, want = load(tmp_path / "model.gguf"), load(write_plain(model[0], plain, tmp_path / "plain"))
    assert_same_weights(got[1], want[1])
    kept = [each["mlp"]["experts"] for each in got[1]["layers"]]
    assert {each["down"]["kernel"].values.dtype.name for each in kept} == {"float4_e2m1fn"}
    assert all(is_quantized(each["gate"]["kernel"]) == (up == "MXFP4") for each in kept)
    assert_same_logits(got, want)
    where = place(got[0], 2)
    halves = load_params(got[0], tmp_path / "model.gguf", "loop", num_parts=2, shardings=where.shardings)
    assert_same_logits((where.model, halves), want)


def test_gates_without_ups_are_refused(tmp_path: Path) -> None:
    config, tensors = gpt_oss()
    write_gguf((config, tensors), tmp_path / "model.gguf", of_kind("F32"))
    data = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(data.replace(b"blk.0.ffn_up_exps.weight", b"blk.0.ffn_up_exqs.weight"))
    with pytest.raises(InvalidArgument, match=r"model.gguf: tensor blk.0.ffn_up_exps.weight is missing"):
        read_model(tmp_path / "model.gguf").tensors().read("model.layers.0.mlp.experts.gate_up_proj", (4, 64, 128))


@pytest.mark.long
@pytest.mark.parametrize("kinds", [of_kind("Q8_0"), of_kind("Q4_K"), mixed], ids=["Q8_0", "Q4_K", "mixed"])
def test_it_computes_what_its_weights_do(kinds: Kinds, tmp_path: Path) -> None:
    file, folder = write_both(kinds, tmp_path)
    assert_same_logits(load(file), load(folder))


@pytest.mark.long
@pytest.mark.parametrize("kinds", [of_kind("Q4_0"), mixed], ids=["Q4_0", "mixed"])
def test_a_model_in_two_parts_computes_the_same(kinds: Kinds, tmp_path: Path) -> None:
    file, _ = write_both(kinds, tmp_path)
    model, params = load(file)
    where = place(model, 2)
    halves = load_params(model, file, "loop", num_parts=2, shardings=where.shardings)
    assert_same_logits((where.model, halves), (model, params))


@pytest.mark.parametrize("kind", ["NVFP4"])
def test_another_type_is_refused_with_the_name_of_its_tensor(kind: str, tmp_path: Path) -> None:
    model = checkpoint("llama_mha", **WIDE, **HEADS)
    file = tmp_path / "model.gguf"
    write_gguf(model, file, lambda name, shape: kind if name == "blk.1.ffn_up.weight" else "F32")
    with pytest.raises(Unsupported, match=rf"model.layers.1.mlp.up_proj.weight has type {kind}; supported GGUF types"):
        load(find_folder(str(file)))
    assert dataclasses.is_dataclass(read_config(file))


def test_an_exponent_of_mxfp4_that_encodes_no_number_is_refused() -> None:
    rows = np.full((2, 34), 127, np.uint8)
    assert BLOCK_TYPES["MXFP4"].is_finite(rows)
    rows[1, 17] = 255
    assert not BLOCK_TYPES["MXFP4"].is_finite(rows)


def test_the_shapes_of_transposed_quantized_matrices_are_checked_as_stored(tmp_path: Path) -> None:
    write_gguf(
        checkpoint("gpt2"), tmp_path / "tiny.gguf", lambda name, shape: "Q8_0" if name.endswith("qkv.weight") else "F32"
    )
    config = read_config(tmp_path / "tiny.gguf")
    with open_tensors(tmp_path / "tiny.gguf") as files:
        check_tensors(files, config, read_scheme(tmp_path / "tiny.gguf"))
