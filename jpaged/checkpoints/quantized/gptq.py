"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them, and AWQ checkpoints in the layout `gemm` of AutoAWQ.

    weight = scale * (number - zero)

GPTQ
    qweight  int32 [in * bits / 32, out]        a word holds numbers of consecutive rows, the first in its lowest bits
    qzeros   int32 [groups, out * bits / 32]    likewise of consecutive columns; in format v1 one less than the zero
    scales   [groups, out]
    g_idx    int32 [in]                         the group of each row; with desc_act in any order

    Numbers of 3 bits follow each other without gaps: 32 are three words, and some are in two of them.

AWQ
    qweight  int32 [in, out / 8]                eight columns in a word, ordered 0 2 4 6 1 3 5 7 from the lowest bits
    qzeros   int32 [groups, out / 8]            likewise
    scales   [groups, out]

For format v1 of GPTQ, GPTQModel subtracts one from the zeros in whole words, so that a zero of 0 borrows from the next
one. AutoGPTQ subtracted it from each number separately, and corrupted the rest of the word if a zero was 0. If numbers
have 3 bits, GPTQModel subtracts others than one, which are added again here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jpaged.checkpoints.quantized.scheme import (
    TUNING,
    MatrixPart,
    Parts,
    Shape,
    StoredMatrix,
    build_rules,
    dynamic_rules,
    not_among,
    require_whole,
    signed,
    within,
    words_to_numbers,
)
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.kernels.matrix_format import MatrixFormat, Values
from jpaged.models.config import Quantization
from jpaged.models.json_fields import JsonFields

_AWQ_BITS = 4
_PER_WORD = 32 // _AWQ_BITS
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each of eight columns in its word."""

_HARMLESS_OF_AWQ = (
    *TUNING,
    "backend",
    "do_fuse",
    "exllama_config",
    "fuse_max_seq_len",
    "meta",
    "modules_to_fuse",
    "pack_impl",
    "quant_method",
    "sym",
)


@dataclass(frozen=True, slots=True)
class Awq:
    """The layout of AWQ."""

    quantization: Quantization

    def parts(self, module: str, shape: Shape, form: MatrixFormat) -> Parts:
        """See `Scheme`."""
        (num_out, depth), groups = shape, form.num_groups(shape[1])
        require_whole(module, shape, 1, _PER_WORD)
        return {
            "qweight": MatrixPart(f"{module}.qweight", ((depth, num_out // _PER_WORD),), ("int32",)),
            "qzeros": MatrixPart(f"{module}.qzeros", ((groups, num_out // _PER_WORD),), ("int32",)),
            "scales": MatrixPart(f"{module}.scales", ((groups, num_out),)),
        }

    def read(self, tensors: Mapping[str, np.ndarray], shape: Shape, form: MatrixFormat) -> StoredMatrix:
        """See `Scheme`."""
        values, zeros = (
            signed(_in_order(words_to_numbers(tensors[key], _AWQ_BITS)), _AWQ_BITS) for key in ("qweight", "qzeros")
        )
        return StoredMatrix(values.T.astype(form.dtype), tensors["scales"].astype(np.float32).T, zeros.T)


def read_awq(fields: JsonFields) -> Awq:
    """Parse a `quantization_config` of AWQ.

    Raises:
        Unsupported: a setting is not supported; it is named.
        InvalidArgument: a value is malformed.
    """
    fields.only("bits", _AWQ_BITS, why="AWQ supports only 4 bits")
    fields.only("w_bit", _AWQ_BITS, why="AWQ supports only 4 bits")
    fields.only("version", "gemm", "GEMM", why="only the layout gemm is supported")
    for key in ("checkpoint_format", "format"):
        fields.only(key, "gemm", why="only the layout gemm is supported")
    fields.only("method", "awq", why="the method must be AWQ")
    fields.only("pack_dtype", "int32", why="only int32 words are supported")
    fields.only("desc_act", False, why="AWQ does not support listed groups")
    fields.only("zero_point", True, why="AWQ without zero points is not supported")
    group_key = "q_group_size" if fields.has("q_group_size") else "group_size"
    group_size = fields.integer(group_key, 128, minimum=-1)
    # AutoAWQ skips a module if its name contains any of these, also within a word (awq/utils/module.py).
    left = [re.escape(name) for name in fields.names("modules_to_not_convert")]
    has_output = fields.flag("lm_head", False)
    fields.only("data_type", "int", why="AWQ supports only integers")
    fields.ignore(_HARMLESS_OF_AWQ)

    def read_own(own: JsonFields) -> MatrixFormat:
        own.only("bits", _AWQ_BITS, why="AWQ supports only 4 bits")
        own.ignore(_HARMLESS_OF_AWQ)
        return format_of_groups(own.integer("group_size", group_size, minimum=-1))

    rules = build_rules(format_of_groups(group_size), left, dynamic_rules(fields, read_own))
    return Awq(Quantization("awq", rules, has_output))


def format_of_groups(group_size: int) -> MatrixFormat:
    """Return the format of a matrix with groups of this size; -1 is one group."""
    return MatrixFormat("int4", group_size if group_size > 0 else None, has_zeros=True)


def _in_order(numbers: np.ndarray) -> np.ndarray:
    """Reorder numbers `[rows, columns]` from the order in words to the order of columns."""
    words = numbers.reshape(len(numbers), -1, _PER_WORD)
    return words[:, :, PLACES].reshape(numbers.shape)


# Quantization procedure and kernels of other programs, which do not affect the numbers.
_HARMLESS = (
    *TUNING,
    "backend",
    "block_name_to_quantize",
    "cache_block_outputs",
    "disable_exllama",
    "exllama_config",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "pack_impl",
    "pad_token_id",
    "quant_method",
    "tokenizer",
    "use_cuda_fp16",
    "use_exllama",
)
BITS: Mapping[int, Values] = {2: "int4", 3: "int4", 4: "int4", 8: "int8"}
_GPTQ_PACKING, _AWQ_PACKING = "auto_round:auto_gptq", "auto_round:auto_awq"
_PLAIN_BITS = 16
_ACTIVATIONS = ("act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym")
_ONES = {2: (0x55555555,), 3: (0x24924924, 0x92492492, 0x49249249), 4: (0x11111111,), 8: (0x01010101,)}
"""What GPTQModel subtracts from words of zeros: ones, except for 3 bits (`convert_gptq_v2_to_v1_format`)."""


@dataclass(frozen=True, slots=True)
class Gptq:
    """The layout of GPTQ.

    Attributes:
        zeros_are_less: zeros are stored minus one (format v1).
        borrows: the one was subtracted from whole words, so zeros of 0 are readable; otherwise they are an error.
        bits: those that matrices have in the files, of which their sizes name one for each.
        is_of_gptqmodel: written by GPTQModel.
    """

    quantization: Quantization
    zeros_are_less: bool
    borrows: bool
    bits: frozenset[int]
    is_of_gptqmodel: bool = False

    def widening(self) -> str | None:
        """Return what matrices of fewer bits than in memory cost; None if there are none."""
        fewer = sorted(self.bits - {4, 8})
        return f"GPTQ: {' and '.join(map(str, fewer))} bits per weight in the file take 4 in memory" if fewer else None

    def parts(self, module: str, shape: Shape, form: MatrixFormat) -> Parts:
        """See `Scheme`."""
        (num_out, depth), groups = shape, form.num_groups(shape[1])
        known = sorted(bits for bits in self.bits if BITS[bits] == form.values)
        per_word = min(_multiple(bits) for bits in known)
        require_whole(module, shape, per_word, per_word)
        stored = [bits for bits in known if num_out % _multiple(bits) == 0 and depth % _multiple(bits) == 0]
        lost = functools.partial(_lost_zeros, stored, num_out)
        return {
            "qweight": MatrixPart(
                f"{module}.qweight", tuple((depth * bits // 32, num_out) for bits in stored), ("int32",)
            ),
            "qzeros": MatrixPart(
                f"{module}.qzeros",
                tuple((groups, num_out * bits // 32) for bits in stored),
                ("int32",),
                problem=None if self.borrows or not self.zeros_are_less else lost,
            ),
            "scales": MatrixPart(f"{module}.scales", ((groups, num_out),)),
            "g_idx": MatrixPart(
                f"{module}.g_idx",
                ((depth,),),
                ("int32",),
                is_optional=not form.has_group_ids,
                problem=not_among(groups) if form.has_group_ids else None,
            ),
        }

    def read(self, tensors: Mapping[str, np.ndarray], shape: Shape, form: MatrixFormat) -> StoredMatrix:
        """See `Scheme`."""
        depth = shape[1]
        bits = len(tensors["qweight"]) * 32 // depth
        values = signed(words_to_numbers(np.ascontiguousarray(tensors["qweight"].T), bits), bits)
        words = tensors["qzeros"].view(np.uint32)
        by_number = bits == 3 and not self.is_of_gptqmodel
        if self.zeros_are_less and not by_number:
            words = words + np.resize(np.array(_ONES[bits], np.uint32), words.shape[1])
        zeros = words_to_numbers(words, bits)
        if self.zeros_are_less and by_number:
            zeros = (zeros + 1) % 2**bits
        ids = tensors.get("g_idx")
        if ids is not None and not form.has_group_ids:
            counted = np.arange(depth) // (form.group_size or depth)
            if not np.array_equal(ids, counted):
                raise InvalidArgument("quantization_config desc_act", "is false, but a g_idx is not in order")
            ids = None
        scales = tensors["scales"].astype(np.float32).T
        return StoredMatrix(values.astype(form.dtype), scales, signed(zeros, bits).T, ids)


def _multiple(bits: int) -> int:
    """Return of which number the sizes of a matrix are multiples."""
    return 32 // bits if 32 % bits == 0 else 32


def _lost_zeros(stored: Sequence[int], num_out: int, words: np.ndarray) -> str | None:
    bits = next(bits for bits in stored if words.shape[1] == num_out * bits // 32)
    numbers = words_to_numbers(words, bits).reshape(-1, _multiple(bits))
    if not (numbers[:, :-1] == 2**bits - 1).any():
        return None
    return (
        "has zero points of 0, which AutoGPTQ writes over the following ones if sym is false, and the config's meta "
        "does not name a quantizer gptqmodel: quantize it again, or name the quantizer that wrote it"
    )


def read_gptq(fields: JsonFields) -> Gptq:
    """Parse a `quantization_config` of GPTQ.

    Raises:
        Unsupported: a setting is not supported; it is named.
        InvalidArgument: a value is malformed.
    """
    bits, written = set[int](), _checkpoint_format(fields)
    form = _read_form(fields, bits)
    common = next(iter(bits))
    borrows = fields.flag("sym", True) or _is_of_gptqmodel(fields)
    fields.only("data_type", "int", why="GPTQ supports only integers")
    fields.only("method", "gptq", why="the method must be GPTQ")
    fields.only("is_marlin_format", False, why="the order of Marlin's kernel is not supported")
    fields.only("pack_dtype", "int32", why="only int32 words are supported")
    left = fields.names("modules_to_not_convert")

    def read_own(own: JsonFields) -> MatrixFormat:
        own.only("sym", fields.flag("sym", True), why="modules with a different sym are not supported")
        own.ignore(_HARMLESS)
        return _read_form(own, bits, form, common)

    rules = build_rules(form, within(left), dynamic_rules(fields, read_own))
    if chosen := _chosen(fields):
        rules = (*rules[:-1], *((pattern, form) for pattern in within(chosen)))
    quantization = Quantization("gptq", rules, has_output=fields.flag("lm_head", False))
    fields.ignore(_HARMLESS)
    return Gptq(quantization, written == "gptq", borrows, frozenset(bits), _is_of_gptqmodel(fields))


def read_auto_round(fields: JsonFields) -> Gptq | Awq:
    """Parse the config of AutoRound, which has the layout of GPTQ or AWQ, by its `packing_format`.

    `extra_config` has modules with other settings, by names or expressions; 16 bits leave a module unquantized.

    Raises:
        Unsupported: a setting is not supported; it is named.
        InvalidArgument: a value is malformed.
    """
    packing = fields.text("packing_format", _GPTQ_PACKING)
    if packing not in (_GPTQ_PACKING, _AWQ_PACKING):
        raise Unsupported(f"{fields.name}: packing_format is {packing!r}; supported: {_GPTQ_PACKING}, {_AWQ_PACKING}")
    fields.only("data_type", "int", why="AutoRound supports only integers")
    if fields.integer("act_bits", _PLAIN_BITS) < _PLAIN_BITS:
        raise Unsupported(
            f"{fields.name}: act_bits is {fields.value('act_bits')}; quantized activations of AutoRound are not "
            "supported"
        )
    bits, is_symmetric = set[int](), fields.flag("sym", True)
    form = _read_form(fields, bits)
    common = next(iter(bits))
    if packing == _AWQ_PACKING:
        form = _awq_form(fields, form, common)
    rules: list[tuple[str, MatrixFormat | None]] = []
    extra = fields.mapping("extra_config")
    for name in sorted(extra, key=_is_expression):
        own = JsonFields(_object(fields, name, extra[name]), f"{fields.name} {name}")
        rule = name if _is_expression(name) else f"^{re.escape(name)}$"
        if own.integer("bits", common) >= _PLAIN_BITS or own.text("data_type", "int") == "float":
            rules.append((_checked(rule), None))
            continue
        own.only("data_type", "int", why="AutoRound supports only integers")
        own.only("sym", is_symmetric, why="modules with a different sym are not supported")
        own.ignore((*_HARMLESS, *_ACTIVATIONS))
        mine = _read_form(own, bits, form, common)
        own.finish()
        mine = _awq_form(own, mine, own.integer("bits", common)) if packing == _AWQ_PACKING else mine
        rules.append((_checked(rule), mine))
    names = _block_names(fields)
    has_output = fields.flag("quant_lm_head", False) or "lm_head" in extra
    rules += [(re.escape(name), form) for name in names or ("",)]
    quantization = Quantization("auto-round", tuple(rules), has_output)
    fields.ignore((*_HARMLESS, *_ACTIVATIONS))
    if packing == _AWQ_PACKING:
        return Awq(quantization)
    return Gptq(quantization, zeros_are_less=True, borrows=is_symmetric, bits=frozenset(bits))


def _block_names(fields: JsonFields) -> list[str]:
    """Return the name parts of quantized modules, by either key; empty for all modules."""
    given = fields.value("block_name_to_quantize") or fields.value("to_quant_block_names")
    parts = given.split(",") if isinstance(given, str) else given
    listed = parts if isinstance(parts, list) else []
    return [str(name).strip() for each in listed for name in (each if isinstance(each, list) else [each])]


def _awq_form(fields: JsonFields, form: MatrixFormat, bits: int) -> MatrixFormat:
    if bits != _AWQ_BITS:
        raise Unsupported(f"{fields.name}: bits is {bits}; AWQ supports only 4 bits")
    return format_of_groups(form.group_size or -1)


def _object(fields: JsonFields, name: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise fields.bad("extra_config", f"{name} is {value!r}; it must be an object")
    return value


def _is_expression(name: str) -> bool:
    return not re.fullmatch(r"[\w.\-]+", name)


def _checked(rule: str) -> str:
    try:
        re.compile(rule)
    except re.error as error:
        raise Unsupported(f"quantization_config: {rule!r} is not a regular expression: {error}") from error
    return rule


def _read_form(
    fields: JsonFields, found: set[int], other: MatrixFormat | None = None, other_bits: int | None = None
) -> MatrixFormat:
    """Parse the format of a checkpoint, or of a module whose settings override those of `other`; add its bits."""
    bits = fields.integer("bits", other_bits)
    if bits not in BITS:
        raise Unsupported(f"{fields.name}: bits is {bits}; GPTQ supports only {', '.join(map(str, BITS))}")
    found.add(bits)
    group_size = fields.integer("group_size", None if other is None else other.group_size or -1, minimum=-1)
    has_ids = fields.flag("desc_act", False if other is None else other.has_group_ids)
    return MatrixFormat(
        BITS[bits], group_size if group_size > 0 else None, has_zeros=True, has_group_ids=has_ids and group_size > 0
    )


def _is_of_gptqmodel(fields: JsonFields) -> bool:
    quantizer = JsonFields(fields.mapping("meta"), f"{fields.name} meta").value("quantizer")
    names = quantizer if isinstance(quantizer, list) else [quantizer]
    return any(isinstance(name, str) and name.lower().startswith("gptqmodel") for name in names)


def _chosen(fields: JsonFields) -> list[str]:
    """Return the only modules of a block that are quantized, from a list of lists; empty for all."""
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
        raise Unsupported(f"quantization_config: checkpoint_format is {written!r}; supported: gptq, gptq_v2")
    return written
