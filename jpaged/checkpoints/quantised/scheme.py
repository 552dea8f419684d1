"""What every layout of quantised weights is to those who load them, and what they make of its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jpaged.checkpoints.tensor_source import TensorSource
from jpaged.errors import InvalidArgument
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.models.quantisation.rules import Quantisation

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a quantised matrix.

    Attributes:
        name: in the checkpoint.
        shapes: that it may have.
        dtypes: that it may be of; none is any type of weights.
        is_optional: the matrix may be without it.
        block_rows: outputs that share one of its rows; `Scheme.read` gets a row for each output.
        problem: what is wrong with its numbers; None where nothing is.
    """

    name: str
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...] = ()
    is_optional: bool = False
    block_rows: int = 1
    problem: Callable[[np.ndarray], str | None] | None = None

    def read(self, files: TensorSource, num_out: int) -> np.ndarray:
        """The tensor, with a row for each of so many outputs where these share them.

        Raises:
            InvalidArgument: it holds what is no number, or has a problem.
        """
        tensor = files.read(self.name, files.shape(self.name))
        problem = None if self.problem is None else self.problem(tensor)
        if not np.issubdtype(tensor.dtype, np.integer) and not np.isfinite(tensor.astype(np.float32)).all():
            problem = "has numbers that are not finite"
        if problem is not None:
            raise InvalidArgument(str(files.where(self.name)), f"tensor {self.name} {problem}")
        return tensor if self.block_rows == 1 else np.repeat(tensor, self.block_rows, axis=0)[:num_out]


Parts = Mapping[str, Part]
UNUSED = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", "k_proj.output_scale", "v_proj.output_scale")
"""How the names of tensors end that say how others keep keys and values: here `--kv-cache-dtype` does."""
FLOATS = ("float32", "bfloat16", "float16")
TUNING = (
    # AutoRound
    *("amp", "autoround_version", "batch_size", "dataset", "dynamic_max_gap", "enable_adam", "enable_alg_ext"),
    *("enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "enable_torch_compile"),
    *("gradient_accumulate_steps", "iters", "low_cpu_mem_usage", "low_gpu_mem_usage", "lr", "lr_scheduler"),
    *("minmax_lr", "model_free", "momentum", "not_use_best_mse", "nsamples", "optimizer", "provider", "sampler"),
    *("scale_dtype", "seed", "seqlen", "to_quant_block_names", "train_bs"),
    # GPTQModel
    *("act_group_aware", "auto_forward_data_parallel", "compute_device_filter", "damp_auto_increment"),
    *("damp_percent", "dense_vram_strategy", "failsafe", "fallback", "foem", "gc_mode", "gptaq", "gptaq_alpha"),
    *("hessian", "hyb_act", "moe", "moe_vram_strategy", "mse", "offload_to_disk", "offload_to_disk_path"),
    *("static_groups", "true_sequential", "v2", "v2_alpha", "vram_strategy", "wait_for_submodule_finalizers"),
)
"""Keys about how numbers were found, which do not change what they are."""


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix as it was published, unpacked: `[out, in]`, or `[experts, in, out]`; axis 1 is contracted either way.

    Attributes:
        values: of the type that the format names.
        scales: float32, as values with groups in the place of `in`; or one, for all of it.
        zeros: int8, or float32 where they are not whole, as scales.
        group_ids: int32 `[in]`.
        input_scale: what rows are divided by.
        group_size: numbers of `in` that share a scale; the last group may have fewer.
    """

    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None
    group_ids: np.ndarray | None = None
    input_scale: float | None = None
    group_size: int | None = None

    def weights(self) -> np.ndarray:
        """The weights that it stands for, float32."""
        weights = self.values.astype(np.float32)
        if self.zeros is not None:
            weights -= self._spread(self.zeros)
        weights *= self._spread(self.scales)
        return weights

    def _spread(self, of_groups: np.ndarray) -> np.ndarray:
        """One number for each of the values along the contracted axis, or one for all."""
        if of_groups.shape[1] == 1:
            return of_groups
        ids = np.arange(self.values.shape[1]) // (self.group_size or 1) if self.group_ids is None else self.group_ids
        return of_groups[:, ids]


class Scheme(Protocol):
    """A layout of quantised weights, as a checkpoint's `quantization_config` describes it."""

    @property
    def quantisation(self) -> Quantisation:
        """Which matrices have it, and what they are in memory."""

    def parts(self, module: str, shape: Shape, form: MatrixFormat) -> Parts:
        """The tensors of a module whose weight, were it not quantised, had this shape."""

    def read(self, tensors: Mapping[str, np.ndarray], shape: Shape, form: MatrixFormat) -> StoredMatrix:
        """The matrix of a module's tensors, which are there, of a shape and type that `parts` allows."""


def read_matrix(scheme: Scheme, files: TensorSource, module: str, shape: Shape) -> StoredMatrix:
    """Reads one quantised matrix, whole.

    Raises:
        InvalidArgument: a tensor of it is missing, misshapen, of another type, or holds what is no number.
    """
    form = scheme.quantisation.format_of(module)
    assert form is not None
    parts = scheme.parts(module, shape, form)
    check_parts(files, parts, shape)
    tensors = {key: part.read(files, shape[0]) for key, part in parts.items() if part.name in files.names}
    return dataclasses.replace(scheme.read(tensors, shape, form), group_size=form.group_size)


def check_parts(files: TensorSource, parts: Parts, shape: Shape) -> None:
    """Refuses tensors that are missing, misshapen or of another type, by name."""
    for part in parts.values():
        where = str(files.where(part.name))
        if part.name not in files.names:
            if not part.is_optional:
                raise InvalidArgument(where, f"tensor {part.name} is missing from the checkpoint")
            continue
        stored, dtype = files.shape(part.name), files.dtype(part.name).name
        if stored not in part.shapes:
            allowed = " or ".join(str(list(each)) for each in part.shapes)
            raise InvalidArgument(
                where, f"tensor {part.name} has shape {list(stored)}; a weight of {list(shape)} makes it {allowed}"
            )
        if dtype not in (part.dtypes or FLOATS):
            raise InvalidArgument(
                where, f"tensor {part.name} is {dtype}; it must be {' or '.join(part.dtypes or FLOATS)}"
            )


def words_to_numbers(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 `[..., n]` -> uint8 `[..., n * 32 / bits]`: numbers that lie in a word from its lowest bits on."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    numbers = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return numbers.astype(np.uint8).reshape(*words.shape[:-1], -1)


def numbers_to_words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """uint8 `[..., n]` -> int32 `[..., ceil(n * bits / 32)]`, the inverse; the last word is filled with zeros."""
    per_word = 32 // bits
    missing = -numbers.shape[-1] % per_word
    padded = np.pad(numbers, (*((0, 0),) * (numbers.ndim - 1), (0, missing))).astype(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words = padded.reshape(*padded.shape[:-1], -1, per_word) << shifts
    packed: np.ndarray = np.bitwise_or.reduce(words, axis=-1).view(np.int32)
    return packed


def signed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers from 0 as int8 that are as far from the middle: 8 of 4 bits is 0."""
    return (numbers.astype(np.int16) - 2 ** (bits - 1)).astype(np.int8)


def not_among(num_groups: int, least: int = 0) -> Callable[[np.ndarray], str | None]:
    """The problem of listed groups that are not among so many.

    Args:
        least: the smallest number that a list may have.
    """

    def problem(ids: np.ndarray) -> str | None:
        low, high = int(ids.min()), int(ids.max())
        if low >= least and high < num_groups:
            return None
        return f"lists groups from {low} to {high}; there are {num_groups}, counted from 0"

    return problem
