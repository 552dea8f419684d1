"""Writer of Orbax checkpoints, one tensor at a time.

It is separate from the reader, because importing Orbax takes most of a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jpaged.checkpoints.orbax import PARAMS_FOLDER
from jpaged.checkpoints.tensor_files import StoredTensor

_CHUNK_BYTES = 2**20  # 512 x 1024 in bfloat16; Orbax warns of less
_MAX_PRIME = 4096
# Not needed for reading; it contains the path on the machine that wrote the checkpoint.
_OF_ONE_MACHINE = ("commit_success.txt",)


def write_orbax(tensors: Sequence[StoredTensor], folder: Path, max_file_bytes: int | None) -> None:
    """Write the tensors into `folder / PARAMS_FOLDER`, one after another, without the manifest.

    Host memory holds one tensor, and its parts that are being written.

    Args:
        folder: must exist.
        max_file_bytes: approximate size of a data file; None for Orbax' default.

    Raises:
        OSError, ValueError: a file could not be written; tensorstore has no error class.
    """
    target = (folder / PARAMS_FOLDER).resolve()
    handler = ocp.PyTreeCheckpointHandler(
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (StoredTensor, _OneByOne(deepcopy_host_arrays=False)),
            (jax.Array, ocp.type_handlers.ArrayHandler()),  # there are none, and Orbax warns about that
        ),
        use_zarr3=True,
        use_compression=False,  # weights are noise
    )
    tree = {tensor.name: tensor for tensor in tensors}
    arguments = ocp.args.PyTreeSave(
        tree,
        save_args={name: ocp.SaveArgs(chunk_byte_size=_chunk_bytes(tensor)) for name, tensor in tree.items()},
        ocdbt_target_data_file_size=max_file_bytes,
    )
    with ocp.Checkpointer(handler) as saver:
        saver.save(target, args=arguments)
    for name in _OF_ONE_MACHINE:
        (target / name).unlink(missing_ok=True)


class _OneByOne(ocp.type_handlers.NumpyHandler):
    """Orbax' handler of NumPy arrays for tensors that are not read yet; the original would write all at once."""

    async def serialize(self, values: Sequence[StoredTensor], infos: Sequence[Any], args: Any = None) -> list[Any]:
        for value, info, arg in zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True):
            for written in await super().serialize([np.ascontiguousarray(value.read())], [info], [arg]):
                await asyncio.to_thread(written.result)
        return []


def _chunk_bytes(tensor: StoredTensor) -> int | None:
    """Return the chunk size; None for an axis with a large prime factor, which Orbax would split into single rows."""
    return None if any(_largest_prime(size) > _MAX_PRIME for size in tensor.shape) else _CHUNK_BYTES


def _largest_prime(number: int) -> int:
    """Return the largest prime factor."""
    factor = 2
    while factor * factor <= number:
        if number % factor == 0:
            number //= factor
        else:
            factor += 1
    return number
