"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

qweight  int32 [in * bits / 32, out]        a word holds numbers of consecutive rows, the first in its lowest bits
qzeros   int32 [groups, out * bits / 32]    likewise of consecutive columns; in format v1 one less than the zero
scales   [groups, out]
g_idx    int32 [in]                         the group of each row; with desc_act in any order

weight = scale * (number - zero)

GPTQModel takes one from the zeros of format v1 in whole words, so that a zero of 0 borrows from the next one. AutoGPTQ
took it from each number alone, and lost the rest of the word where that was 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jpaged.checkpoints.quantised.patterns import left_by_dynamic, rules_of, within
from jpaged.checkpoints.quantised.scheme import (
    Part,
    Parts,
    Shape,
    StoredMatrix,
    not_among,
    signed,
    words_to_numbers,
)
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.kernels.matrix_format import MatrixFormat, Values
from jpaged.models.json_fields import JsonFields
from jpaged.models.quantisation.rules import Quantisation

# How the numbers were found, and by which kernel others would multiply: neither changes what they are.
_HARMLESS = (
    "act_group_aware",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "disable_exllama",
    "exllama_config",
    "hyb_act",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "mse",
    "pack_impl",
    "pad_token_id",
    "quant_method",
    "static_groups",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
)
BITS: Mapping[int, Values] = {4: "int4", 8: "int8"}
_ONES = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}


@dataclass(frozen=True, slots=True)
class Gptq:
    """The layout of GPTQ.

    Attributes:
        zeros_are_less: zeros are stored one less than they are (format v1).
        borrows: which was taken from whole words, if a zero is 0; else that is refused.
    """

    quantisation: Quantisation
    bits: int
    zeros_are_less: bool
    borrows: bool

    def parts(self, module: str, shape: Shape, form: MatrixFormat) -> Parts:
        """See `Scheme`."""
        (num_out, depth), groups, per_word = shape, form.num_groups(shape[1]), 32 // self.bits
        return {
            "qweight": Part(f"{module}.qweight", ((depth // per_word, num_out),), ("int32",)),
            "qzeros": Part(
                f"{module}.qzeros",
                ((groups, num_out // per_word),),
                ("int32",),
                problem=None if self.borrows or not self.zeros_are_less else self._lost_zeros,
            ),
            "scales": Part(f"{module}.scales", ((groups, num_out),)),
            "g_idx": Part(
                f"{module}.g_idx",
                ((depth,),),
                ("int32",),
                is_optional=not form.has_group_ids,
                problem=not_among(groups) if form.has_group_ids else None,
            ),
        }

    def read(self, tensors: Mapping[str, np.ndarray], shape: Shape, form: MatrixFormat) -> StoredMatrix:
        """See `Scheme`."""
        bits, depth = self.bits, shape[1]
        values = signed(words_to_numbers(np.ascontiguousarray(tensors["qweight"].T), bits), bits)
        words = tensors["qzeros"].view(np.uint32)
        zeros = words_to_numbers(words + _ONES[bits] if self.zeros_are_less else words, bits)
        ids = tensors.get("g_idx")
        if ids is not None and not form.has_group_ids:
            counted = np.arange(depth) // (form.group_size or depth)
            if not np.array_equal(ids, counted):
                raise InvalidArgument("quantization_config desc_act", "is false, and a g_idx is not in order")
            ids = None
        scales = tensors["scales"].astype(np.float32).T
        return StoredMatrix(values.astype(form.dtype), scales, signed(zeros, bits).T, ids)

    def _lost_zeros(self, words: np.ndarray) -> str | None:
        numbers = words_to_numbers(words, self.bits).reshape(-1, 32 // self.bits)
        if not (numbers[:, :-1] == 2**self.bits - 1).any():
            return None
        return (
            "has zero points of 0, which AutoGPTQ writes over those behind them where sym is false, and the config's "
            "meta names no quantizer gptqmodel: quantise it again, or name the quantizer that wrote it"
        )


def read_config(fields: JsonFields) -> Gptq:
    """The layout that a `quantization_config` of GPTQ describes.

    Raises:
        Unsupported: a setting that is not computed; it is named.
        InvalidArgument: a malformed value.
    """
    bits, group_size = fields.integer("bits"), fields.integer("group_size", minimum=-1)
    if bits not in BITS:
        raise Unsupported(f"quantization_config: bits is {bits}; of GPTQ 4 and 8 are read")
    has_ids, written = fields.flag("desc_act", False), _checkpoint_format(fields)
    borrows = fields.flag("sym", True) or _is_of_gptqmodel(fields)
    fields.only("method", "gptq", why="the method is that of GPTQ")
    fields.only("is_marlin_format", False, why="numbers in the order of Marlin's kernel are not read")
    fields.only("pack_dtype", "int32", why="only words of int32 are read")
    left = fields.names("modules_to_not_convert")
    form = MatrixFormat(
        BITS[bits], group_size if group_size > 0 else None, has_zeros=True, has_group_ids=has_ids and group_size > 0
    )
    rules = rules_of(form, [*within(left), *left_by_dynamic(fields)])
    if chosen := _chosen(fields):
        rules = (*rules[:-1], *((pattern, form) for pattern in within(chosen)))
    quantisation = Quantisation("gptq", rules, has_output=fields.flag("lm_head", False))
    fields.ignore(_HARMLESS)
    return Gptq(quantisation, bits, written == "gptq", borrows)


def _is_of_gptqmodel(fields: JsonFields) -> bool:
    quantizer = JsonFields(fields.mapping("meta"), f"{fields.name} meta").value("quantizer")
    names = quantizer if isinstance(quantizer, list) else [quantizer]
    return any(isinstance(name, str) and name.lower().startswith("gptqmodel") for name in names)


def _chosen(fields: JsonFields) -> list[str]:
    """The modules of a block that alone are quantised, listed by the turns in which they were; none are all."""
    key = "modules_in_block_to_quantize"
    turns = fields.value(key)
    if turns is None:
        return []
    lists = [turn if isinstance(turn, list) else [turn] for turn in turns] if isinstance(turns, list) else []
    names = [name for each in lists for name in each]
    if not isinstance(turns, list) or not all(isinstance(name, str) for name in names):
        raise fields.bad(key, f"is {turns!r}; it must be a list of lists of names")
    return names


def _checkpoint_format(fields: JsonFields) -> str:
    written = fields.text("checkpoint_format", fields.text("format", "gptq"))
    if written not in ("gptq", "gptq_v2"):
        raise Unsupported(f"quantization_config: checkpoint_format is {written!r}; gptq and gptq_v2 are read")
    return written
