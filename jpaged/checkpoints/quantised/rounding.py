"""Quantization of 16 or 32 bit weights at loading: one tensor at a time, each column separately.

| option    | values and scales                                        | rows               |
|-----------|----------------------------------------------------------|--------------------|
| int8      | int8, one scale a column                                 | unchanged          |
| int4      | int4, one scale and zero point for 128 numbers of a column | unchanged        |
| fp8       | float8_e4m3fn, one scale a column                        | fp8, a scale a row |

The matrices of layers are quantized; embedding, output matrix, norms, biases and routers are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, cast, get_args

import numpy as np

from jpaged.checkpoints.finite import refuse_tensor
from jpaged.checkpoints.quantised.scheme import Shape, StoredMatrix
from jpaged.checkpoints.tensor_source import TensorSource, read_weight
from jpaged.errors import InvalidArgument
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.kernels.product.quantised import round_to
from jpaged.models.config import ModelConfig, Quantisation

Asked = Literal["int8", "int4", "fp8"]
ASKED: tuple[Asked, ...] = get_args(Asked)
FORMATS: Mapping[Asked, MatrixFormat] = {
    "int8": MatrixFormat("int8"),
    "int4": MatrixFormat("int4", 128, has_zeros=True),
    "fp8": MatrixFormat("fp8", activations="fp8"),
}


def quantised_here(config: ModelConfig, asked: str) -> ModelConfig:
    """Return the config of a model quantized at loading by an option: `auto`, or one of `ASKED`.

    Raises:
        InvalidArgument: the checkpoint is quantized already.
    """
    form = {**FORMATS}.get(cast(Asked, asked))
    if form is None:
        return config
    if config.quantisation is not None:
        raise InvalidArgument(
            "quantization",
            f"is {asked}, but the checkpoint is already quantized with {config.quantisation.method}: remove the option",
        )
    return replace(config, quantisation=Quantisation(asked, (("", form),)))


def round_matrix(
    files: TensorSource, name: str, shape: Shape, axis: int, form: MatrixFormat, dtype: np.dtype
) -> StoredMatrix:
    """Read a weight, cast it to the model's type, and quantize it.

    Args:
        axis: the contracted axis of the stored weight.

    Raises:
        InvalidArgument: it is not finite, missing or misshapen.
    """
    weights = np.swapaxes(read_weight(files, name, shape).astype(dtype), axis, 1)
    if not np.isfinite(weights).all():
        refuse_tensor(files, name, shape, dtype)
    form = form.split(weights.shape[1], 1)
    values, scales, zeros = round_to(np.ascontiguousarray(weights), form, 1 - weights.ndim)
    return StoredMatrix(values, scales, zeros, group_size=form.group_size)
