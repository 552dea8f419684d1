"""Quantized checkpoints, written by hand as each format is published, and the weights that they stand for.

A layout takes a weight `[out, in]` and gives its tensors by their suffixes, and what they stand for by the definition
of the format: nothing of the code under test is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from jpaged.checkpoints.tensor_files import StoredTensor, write_tensor_files
from tests.models.tiny import TinyCase, tensors

Written = tuple[Mapping[str, np.ndarray], np.ndarray]
Write = Callable[..., Written]
GROUP = 16
BLOCK = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True)
class LayoutCase:
    """One format.

    Attributes:
        config: its `quantization_config`.
        write: what becomes of one weight.
        left: parts of names whose weights stay as they are.
        rounds_rows: products on CPUs round what they multiply, to integers.
        cuts_nothing: the sizes of parts are multiples of the layout's blocks.
    """

    name: str
    config: Mapping[str, object]
    write: Callable[[np.ndarray, np.random.Generator], Written]
    left: tuple[str, ...] = ()
    rounds_rows: bool = False
    cuts_nothing: bool = False


def write_quantized(case: TinyCase, layout: LayoutCase, folder: Path) -> dict[str, np.ndarray]:
    """Writes a tiny checkpoint in a layout, and returns the tensors of the same, dequantized."""
    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    for name, tensor in tensors(case).items():
        module = name.removesuffix(".weight")
        if not name.endswith(("_proj.weight", "_proj_with_mqa.weight")) or any(part in name for part in layout.left):
            stored[name] = plain[name] = tensor
            continue
        # The order of groups follows from the inputs, which query, key and value have in common, and experts have not.
        places = [int(place) for place in module.split(".") if place.isdecimal()]
        inputs = "down" if "down" in module else "out" if "o_proj" in module else "in"
        parts, plain[name] = layout.write(tensor, np.random.default_rng([*places, len(inputs)]))
        stored |= {module + suffix: part for suffix, part in parts.items()}
    config = {**case.config, "quantization_config": layout.config}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_tensors(stored, folder)
    return plain


def write_tensors(stored: Mapping[str, np.ndarray], folder: Path) -> None:
    def of(name: str, tensor: np.ndarray) -> StoredTensor:
        return StoredTensor(name, tensor.shape, tensor.dtype, lambda: tensor)

    write_tensor_files([of(name, tensor) for name, tensor in stored.items()], folder, 2**30)


def by_group(weight: np.ndarray, size: int) -> np.ndarray:
    return weight.reshape(len(weight), -1, size)


def symmetric(weight: np.ndarray, bits: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(numbers [out, in], scales [out, groups]), in float."""
    groups, largest = by_group(weight, size), 2 ** (bits - 1) - 1
    scales = (np.abs(groups).max(-1, keepdims=True) / largest).astype(np.float32)
    return np.rint(groups / scales).reshape(weight.shape), scales[..., 0]


def asymmetric(weight: np.ndarray, bits: int, size: int, least: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(numbers from 0, scales, zeros from `least`) with scales that float16 has."""
    groups = by_group(weight, size)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scales = ((high - low) / (2**bits - 1)).astype(np.float16).astype(np.float32)
    zeros = np.clip(np.rint(-low / scales), least, 2**bits - 1)
    numbers = np.clip(np.rint(groups / scales) + zeros, 0, 2**bits - 1)
    return numbers.reshape(weight.shape), scales[..., 0], zeros[..., 0]


def spread(of_groups: np.ndarray, depth: int) -> np.ndarray:
    return np.repeat(of_groups, depth // of_groups.shape[1], axis=1)


def pack_rows(numbers: np.ndarray, bits: int) -> np.ndarray:
    """`[n, columns]` -> int32 `[n * bits / 32, columns]`, the first in the lowest bits."""
    if bits == 3:  # a whole number of bits for each column
        columns = [sum(int(number) << (3 * place) for place, number in enumerate(column)) for column in numbers.T]
        rows = [[column >> (32 * word) & 0xFFFFFFFF for column in columns] for word in range(3 * len(numbers) // 32)]
        return np.array(rows, np.uint32).view(np.int32)
    per_word = 32 // bits
    words = np.zeros((-(-len(numbers) // per_word), numbers.shape[1]), np.uint32)
    for index, row in enumerate(numbers):
        words[index // per_word] |= row.astype(np.uint32) << np.uint32(bits * (index % per_word))
    return words.view(np.int32)


GPTQMODEL_ONES = {4: [0x11111111], 8: [0x01010101], 3: [0x24924924, 0x92492492, 0x49249249]}
"""What GPTQModel takes from zeros in its first format."""


def gptq(
    bits: int, *, is_v2: bool = False, has_order: bool = False, borrows: bool = False, size: int = GROUP
) -> Callable[..., Written]:
    """Zeros are taken one from as AutoGPTQ does, or so that they borrow, where a part of them are 0."""

    def write(weight: np.ndarray, rng: np.random.Generator) -> Written:
        depth = weight.shape[1]
        order = rng.permutation(depth) if has_order else np.arange(depth)
        if borrows:
            weight = np.where(np.arange(len(weight))[:, None] % 3 == 1, np.abs(weight), weight)
        numbers, scales, zeros = asymmetric(weight[:, order], bits, size, least=int(bits < 4 and not borrows))
        ids = np.empty(depth, np.int32)
        ids[order] = np.arange(depth) // size
        in_place = np.empty_like(numbers)
        in_place[:, order] = numbers
        if borrows:
            assert (zeros == 0).any()
            packed = pack_rows(zeros, bits).view(np.uint32)
            ones = np.resize(np.array(GPTQMODEL_ONES[bits], np.uint32), len(packed))[:, None]
            words = (packed - ones).view(np.int32)
        else:
            words = pack_rows(zeros if is_v2 else (zeros - 1) % 2**bits, bits)
        parts = {
            ".qweight": pack_rows(in_place.T, bits),
            ".qzeros": np.ascontiguousarray(words.T),
            ".scales": scales.T.astype(np.float16),
            ".g_idx": ids,
        }
        return parts, (in_place - zeros[:, ids]) * scales[:, ids]

    return write


def gptq_by_module(weight: np.ndarray, rng: np.random.Generator) -> Written:
    """8 bits in the feed-forward, which alone is 80 wide."""
    return (gptq(8) if 80 in weight.shape else gptq(4))(weight, rng)


def gptq_mixed_orders(weight: np.ndarray, rng: np.random.Generator) -> Written:
    """Each matrix orders its groups as no other does."""
    return gptq(4, has_order=True)(weight, np.random.default_rng(weight.view(np.uint8)[0, :4]))


def awq(weight: np.ndarray, rng: np.random.Generator) -> Written:
    numbers, scales, zeros = asymmetric(weight, 4, GROUP)

    def pack(columns: np.ndarray) -> np.ndarray:
        words = columns.reshape(len(columns), -1, 8).astype(np.uint32)
        packed = sum(words[:, :, column] << np.uint32(4 * place) for place, column in enumerate(_AWQ_ORDER))
        return np.asarray(packed, np.uint32).view(np.int32)

    parts = {".qweight": pack(numbers.T), ".qzeros": pack(zeros.T), ".scales": scales.T.astype(np.float16)}
    depth = weight.shape[1]
    return parts, (numbers - spread(zeros, depth)) * spread(scales, depth)


def compressed_int8(weight: np.ndarray, rng: np.random.Generator) -> Written:
    numbers, scales = symmetric(weight, 8, weight.shape[1])
    return {".weight": numbers.astype(np.int8), ".weight_scale": scales}, numbers * scales


def compressed_int8_static(weight: np.ndarray, rng: np.random.Generator) -> Written:
    parts, plain = compressed_int8(weight, rng)
    return {**parts, ".input_scale": np.array([rng.uniform(0.04, 0.06)], np.float32)}, plain


def compressed_packed(
    bits: int, *, size: int | None, has_zeros: bool, has_order: bool = False
) -> Callable[..., Written]:
    def write(weight: np.ndarray, rng: np.random.Generator) -> Written:
        depth = weight.shape[1]
        order = rng.permutation(depth) if has_order else np.arange(depth)
        ids = np.empty(depth, np.int32)
        ids[order] = np.arange(depth) // (size or depth)
        half, extra = 2 ** (bits - 1), {}
        if has_zeros:
            numbers, scales, zeros = asymmetric(weight[:, order], bits, size or depth)
            extra[".weight_zero_point"] = pack_rows(zeros, bits)
        else:
            numbers, scales = symmetric(weight[:, order], bits, size or depth)
            numbers, zeros = numbers + half, np.full_like(scales, half)
        in_place = np.empty_like(numbers)
        in_place[:, order] = numbers
        if has_order:
            extra[".weight_g_idx"] = ids
        parts = {
            ".weight_packed": np.ascontiguousarray(pack_rows(in_place.T, bits).T),
            ".weight_shape": np.array(weight.shape, np.int64),
            ".weight_scale": scales.astype(np.float32),
            **extra,
        }
        return parts, (in_place - zeros[:, ids]) * scales[:, ids]

    return write


def float8(
    kind: str, *, is_static: bool = False, scale: str = ".weight_scale", size: int = BLOCK
) -> Callable[..., Written]:
    def write(weight: np.ndarray, rng: np.random.Generator) -> Written:
        if kind == "block":
            rows, columns = (-(-extent // size) for extent in weight.shape)
            padded = np.zeros((rows * size, columns * size), np.float32)
            padded[: len(weight), : weight.shape[1]] = weight
            scales = np.abs(padded.reshape(rows, size, columns, size)).max((1, 3)) / 448
            each = np.repeat(np.repeat(scales, size, 0), size, 1)[: len(weight), : weight.shape[1]]
        elif kind == "group":
            scales = np.abs(by_group(weight, size)).max(-1) / 448
            each = spread(scales, weight.shape[1])
        elif kind == "channel":
            each = scales = np.abs(weight).max(1, keepdims=True) / 448
        else:
            each = scales = np.array([np.abs(weight).max() / 448], np.float32)
        numbers = (weight / each).astype(ml_dtypes.float8_e4m3fn)
        parts = {".weight": numbers, scale: scales.astype(np.float32)}
        if is_static:
            parts[".input_scale"] = np.array(rng.uniform(0.01, 0.03), np.float32)
        return parts, numbers.astype(np.float32) * each.astype(np.float32)

    return write


def blocks_beside_groups(weight: np.ndarray, rng: np.random.Generator) -> Written:
    """Blocks in the feed-forward, which alone is 80 wide, and groups of the same size in attention."""
    return float8("block" if 80 in weight.shape else "group", size=GROUP)(weight, rng)


def with_tensor(write: Write, suffix: str, change: Callable[..., np.ndarray]) -> Write:
    """A layout with one tensor changed, or made of the weight where there is none."""

    def changed(weight: np.ndarray, rng: np.random.Generator) -> Written:
        parts, plain = write(weight, rng)
        return {**parts, suffix: change(parts.get(suffix, weight))}, plain

    return changed


def compressed_mxfp4(weight: np.ndarray, rng: np.random.Generator) -> Written:
    groups = by_group(weight, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1, keepdims=True))) - 2
    codes = np.abs((groups / np.exp2(exponents))[..., None] - E2M1).argmin(-1).reshape(weight.shape).astype(np.uint8)
    parts = {
        ".weight_packed": codes[:, 0::2] | (codes[:, 1::2] << 4),
        ".weight_scale": (exponents[..., 0] + 127).astype(np.uint8),
    }
    return parts, E2M1[codes] * spread(np.exp2(exponents[..., 0]), weight.shape[1])


def compressed_nvfp4(weight: np.ndarray, rng: np.random.Generator) -> Written:
    groups = by_group(weight, 16)
    whole = np.float32(448 * 6 / np.abs(weight).max())
    scales = (np.abs(groups).max(-1) / 6 * whole).astype(ml_dtypes.float8_e4m3fn)
    each = spread(scales.astype(np.float32) / whole, weight.shape[1])
    codes = np.abs((weight / each)[..., None] - E2M1).argmin(-1).astype(np.uint8)
    parts = {
        ".weight_packed": codes[:, 0::2] | (codes[:, 1::2] << 4),
        ".weight_scale": scales,
        ".weight_global_scale": np.array([whole], np.float32),
        ".input_global_scale": np.array([rng.uniform(20, 30)], np.float32),
    }
    return parts, E2M1[codes] * each


def modelopt_nvfp4(weight: np.ndarray, rng: np.random.Generator) -> Written:
    parts, plain = compressed_nvfp4(weight, rng)
    whole = 1 / parts[".weight_global_scale"].astype(np.float32)[0]
    return {
        ".weight": parts[".weight_packed"],
        ".weight_scale": parts[".weight_scale"],
        ".weight_scale_2": np.array(whole, np.float32),
        ".input_scale": np.array(0.04, np.float32),
    }, plain


def modelopt_block(weight: np.ndarray, rng: np.random.Generator) -> Written:
    parts, plain = float8("block", size=128)(weight, rng)
    return {**parts, ".weight_scale": parts[".weight_scale"][:, None, :, None]}, plain


def compressed_mxfp8(weight: np.ndarray, rng: np.random.Generator) -> Written:
    exponents = np.floor(np.log2(np.abs(by_group(weight, 32)).max(-1))) - 8
    each = spread(np.exp2(exponents), weight.shape[1])
    numbers = np.clip(weight / each, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    parts = {".weight": numbers, ".weight_scale": (exponents + 127).astype(np.uint8)}
    return parts, numbers.astype(np.float32) * each


def compressed_config(
    written: str, weights: Mapping[str, object], inputs: object = None, **more: object
) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": written,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        **more,
    }


def _int(bits: int, strategy: str, **more: object) -> dict[str, object]:
    base = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": False}
    return {**base, "observer": "minmax", "observer_kwargs": {}, "group_size": None, "block_structure": None, **more}


def _float(strategy: str, **more: object) -> dict[str, object]:
    return {**_int(8, strategy), "type": "float", **more}


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False, "damp_percent": 0.01}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": False, "data_type": "int"}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
_INT_ROWS, _FLOAT_ROWS = _int(8, "token", dynamic=True), _float("token", dynamic=True)

LAYOUTS = [
    LayoutCase("gptq", _GPTQ, gptq(4)),
    LayoutCase("gptq_v2", {**_GPTQ, "checkpoint_format": "gptq_v2"}, gptq(4, is_v2=True)),
    LayoutCase("gptq_desc_act", {**_GPTQ, "desc_act": True}, gptq(4, has_order=True)),
    LayoutCase(
        "gptq_some",
        {
            **_GPTQ,
            "modules_in_block_to_quantize": [
                [f"self_attn.{name}_proj" for name in "qkv"],
                [f"mlp.{name}_proj" for name in ("gate", "up", "down")],
            ],
        },
        gptq(4),
        left=("o_proj",),
    ),
    LayoutCase("gptq_8_bits", {**_GPTQ, "bits": 8}, gptq(8)),
    LayoutCase("gptq_2_bits", {**_GPTQ, "bits": 2}, gptq(2), cuts_nothing=True),
    LayoutCase("gptq_3_bits", {**_GPTQ, "bits": 3}, gptq(3), cuts_nothing=True),
    LayoutCase(
        "gptq_3_bits_borrows",
        {**_GPTQ, "bits": 3, "meta": {"quantizer": ["gptqmodel:5.0.0"]}},
        gptq(3, borrows=True),
        cuts_nothing=True,
    ),
    LayoutCase("gptq_borrows", {**_GPTQ, "meta": {"quantizer": ["gptqmodel:2.2.0"]}}, gptq(4, borrows=True)),
    LayoutCase(
        "gptq_8_bits_borrows",
        {**_GPTQ, "bits": 8, "meta": {"quantizer": "gptqmodel:4.0.0"}},
        gptq(8, borrows=True),
    ),
    LayoutCase("gptq_left", {**_GPTQ, "dynamic": {"-:.*\\.o_proj": {}}}, gptq(4), left=("o_proj",)),
    LayoutCase("gptq_own", {**_GPTQ, "dynamic": {r".*\.mlp\..*": {"bits": 8}}}, gptq_by_module),
    LayoutCase("gptq_mixed_orders", {**_GPTQ, "desc_act": True}, gptq_mixed_orders),
    LayoutCase("auto_round", {**_AUTO_ROUND, "packing_format": "auto_round:auto_gptq"}, gptq(4)),
    LayoutCase("auto_round_awq", {**_AUTO_ROUND, "packing_format": "auto_round:auto_awq"}, awq),
    LayoutCase("awq", {**_AWQ, "modules_to_not_convert": ["mlp"]}, awq, left=("mlp",)),
    LayoutCase("awq_part_of_a_word", {**_AWQ, "modules_to_not_convert": ["mlp.gate"]}, awq, left=("mlp.gate",)),
    LayoutCase(
        "w8a8", compressed_config("int-quantized", _int(8, "channel"), _INT_ROWS), compressed_int8, rounds_rows=True
    ),
    LayoutCase(
        "w8a8_static",
        compressed_config("int-quantized", _int(8, "channel"), _int(8, "tensor")),
        compressed_int8_static,
        rounds_rows=True,
    ),
    LayoutCase(
        "w4a16",
        compressed_config("pack-quantized", _int(4, "group", group_size=GROUP)),
        compressed_packed(4, size=GROUP, has_zeros=False),
    ),
    LayoutCase(
        "w4a16_zeros",
        compressed_config("pack-quantized", _int(4, "group", group_size=GROUP)),
        with_tensor(
            compressed_packed(4, size=GROUP, has_zeros=False),
            ".weight_zero_point",
            lambda weight: np.zeros((len(weight), weight.shape[1] // GROUP), np.int8),
        ),
    ),
    LayoutCase(
        "w4a16_asymmetric",
        compressed_config("pack-quantized", _int(4, "group", group_size=GROUP, symmetric=False)),
        compressed_packed(4, size=GROUP, has_zeros=True),
    ),
    LayoutCase(
        "w4a16_actorder",
        compressed_config("pack-quantized", _int(4, "group", group_size=GROUP, actorder="group")),
        compressed_packed(4, size=GROUP, has_zeros=False, has_order=True),
    ),
    LayoutCase(
        "w4a16_actorder_not_set",
        compressed_config("pack-quantized", _int(4, "group", group_size=GROUP, actorder="group")),
        with_tensor(
            compressed_packed(4, size=GROUP, has_zeros=False),
            ".weight_g_idx",
            lambda weight: np.full(weight.shape[1], -1, np.int32),
        ),
    ),
    LayoutCase(
        "w4a16_actorder_counted",
        compressed_config("pack-quantized", _int(4, "group", group_size=GROUP, actorder="group")),
        compressed_packed(4, size=GROUP, has_zeros=False),
    ),
    LayoutCase(
        "w8a16",
        compressed_config(
            "pack-quantized",
            _int(8, "channel"),
            ignore=["lm_head", "re:.*down_proj", "model.layers.1.self_attn.k_proj"],
        ),
        compressed_packed(8, size=None, has_zeros=False),
        left=("down_proj", "layers.1.self_attn.k_proj"),
    ),
    LayoutCase(
        "fp8_tensor_static",
        compressed_config("float-quantized", _float("tensor"), _float("tensor")),
        float8("tensor", is_static=True),
    ),
    LayoutCase(
        "fp8_channel",
        compressed_config("float-quantized", _float("channel"), _FLOAT_ROWS),
        float8("channel"),
    ),
    LayoutCase(
        "fp8_block",
        compressed_config("float-quantized", _float("block", block_structure=[BLOCK, BLOCK])),
        float8("block"),
    ),
    LayoutCase(
        "fp8_block_beside_group",
        compressed_config(
            "float-quantized",
            {},
            config_groups={
                "group_0": {
                    "targets": ["re:.*mlp.*"],
                    "weights": _float("block", block_structure=[GROUP, GROUP]),
                },
                "group_1": {"targets": ["re:.*attn.*"], "weights": _float("group", group_size=GROUP)},
            },
        ),
        blocks_beside_groups,
    ),
    LayoutCase("deepseek_fp8", _FP8, float8("block", scale=".weight_scale_inv"), cuts_nothing=True),
    LayoutCase(
        "fp8_static",
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head", "o_proj"]},
        float8("tensor", is_static=True),
        left=("o_proj",),
    ),
    LayoutCase(
        "mxfp4",
        compressed_config("mxfp4-pack-quantized", {**_int(4, "group", group_size=32), "type": "float"}),
        compressed_mxfp4,
        cuts_nothing=True,
    ),
    LayoutCase(
        "nvfp4",
        compressed_config(
            "nvfp4-pack-quantized",
            {**_int(4, "tensor_group", group_size=16), "type": "float", "scale_dtype": "torch.float8_e4m3fn"},
            {**_int(4, "tensor_group", group_size=16, dynamic="local"), "type": "float"},
        ),
        compressed_nvfp4,
    ),
    LayoutCase(
        "modelopt_fp8",
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "ignore": ["lm_head", "*.o_proj*"],
            "producer": {"name": "modelopt"},
        },
        float8("tensor", is_static=True),
        left=("o_proj",),
    ),
    LayoutCase(
        "modelopt_fp8_columns",
        {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"},
        float8("channel"),
    ),
    LayoutCase("modelopt_fp8_blocks", {"quant_algo": "fp8_pb_wo", "ignore": ["lm_head"]}, modelopt_block),
    LayoutCase(
        "modelopt_mxfp8",
        {"quant_algo": "MXFP8", "quant_method": "modelopt", "ignore": ["lm_head"]},
        compressed_mxfp8,
        cuts_nothing=True,
    ),
    LayoutCase(
        "modelopt_nvfp4",
        {"quant_algo": "NVFP4", "quant_method": "modelopt_fp4", "group_size": 16, "ignore": ["lm_head"]},
        modelopt_nvfp4,
    ),
    LayoutCase(
        "mxfp8",
        compressed_config("mxfp8-quantized", _float("group", group_size=32, scale_dtype="torch.uint8")),
        compressed_mxfp8,
        cuts_nothing=True,
    ),
]

_GPTQ_OF_8 = {**_GPTQ, "group_size": 8, "meta": {"quantizer": ["gptqmodel:2.2.0"]}}
EXPERT_LAYOUTS = [
    LayoutCase("gptq", {**_GPTQ_OF_8, "desc_act": False}, gptq(4, borrows=True, size=8)),
    LayoutCase("gptq_desc_act", {**_GPTQ_OF_8, "desc_act": True}, gptq(4, has_order=True, borrows=True, size=8)),
    LayoutCase(
        "w4a16_actorder",
        compressed_config(
            "pack-quantized", _int(4, "group", group_size=8, actorder="group"), ignore=["lm_head", "re:.*mlp.gate$"]
        ),
        compressed_packed(4, size=8, has_zeros=False, has_order=True),
    ),
    LayoutCase(
        "w8a8_static",
        compressed_config("int-quantized", _int(8, "channel"), _int(8, "tensor")),
        compressed_int8_static,
        rounds_rows=True,
    ),
    LayoutCase(
        "fp8_tensor_static",
        compressed_config("float-quantized", _float("tensor"), _float("tensor")),
        float8("tensor", is_static=True),
    ),
    LayoutCase("fp8_static", {"quant_method": "fp8", "activation_scheme": "static"}, float8("tensor", is_static=True)),
]
"""Those that have arrays of their own for each expert; widths of 24, 48 and 64 have groups of 8."""
