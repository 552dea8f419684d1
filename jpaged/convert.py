"""`jpaged convert`: a model by its name -> a checkpoint folder in the format that is asked for."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from jpaged.checkpoints.conversion import (
    FORMATS,
    WRITTEN_DTYPES,
    ConversionOptions,
    convert_folder,
    on_host,
    save_params,
)
from jpaged.checkpoints.hub import DEMO, find_folder
from jpaged.checkpoints.weights import Progress, no_progress
from jpaged.demo import checkpoint

__all__ = ["FORMATS", "WRITTEN_DTYPES", "ConversionOptions", "convert", "on_host"]


def convert(source: str, destination: Path, options: ConversionOptions, progress: Progress = no_progress) -> None:
    """Writes a model into a folder.

    Args:
        source: `demo`, a folder with safetensors, one that was written here, or a hub id.
        destination: a folder that is not there, or empty; with `force` also another checkpoint.
        options: the format and how it is written.
        progress: called with (number, total, name) of each tensor.

    Raises:
        InvalidArgument, NotFound, Unsupported, Unavailable: see `jpaged.checkpoints.conversion.convert_folder`.
    """
    if source != DEMO:
        convert_folder(find_folder(source), destination, options, progress)
        return
    config, params = checkpoint.load_demo(np.dtype(ml_dtypes.bfloat16), "loop")
    save_params(params, config, destination, options, companions=checkpoint.FOLDER, progress=progress)
