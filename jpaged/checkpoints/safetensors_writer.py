"""Writer of safetensors files, one tensor at a time; the library's writer takes all tensors of a file at once.

    8 bytes: length of the header | header: JSON, padded with spaces to 8 bytes | the tensors, one after another

A checkpoint of several files has an index file in the format of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jpaged import json_text
from jpaged.checkpoints.tensor_files import FORMAT_DTYPES, INDEX_FILE

_NAME_OF = {dtype: name for name, dtype in FORMAT_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor to write. `read` creates it, once; it is dropped before the next one is read."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize


def write_tensor_files(tensors: Sequence[StoredTensor], folder: Path, max_shard_bytes: int) -> None:
    """Write `model.safetensors`, or shards and their index if one file would exceed the limit.

    Args:
        tensors: in the order in which they are assigned to files.
        folder: must exist.
        max_shard_bytes: limit for the tensors of one file; a larger tensor has a separate file.

    Raises:
        OSError: a file could not be written.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    by_name = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file_name, names in split.filename_to_tensors.items():
        _write_file([by_name[name] for name in names], folder / file_name)
    if split.is_sharded:
        metadata = {"total_parameters": sum(tensor.size for tensor in tensors), **split.metadata}
        index = {"metadata": metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        (folder / INDEX_FILE).write_text(json_text.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(tensors: Sequence[StoredTensor], path: Path) -> None:
    # Wide types first, as in the library: then every tensor is aligned to the size of the type.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    with path.open("wb") as file:
        file.write(_header(ordered))
        for tensor in ordered:
            array = np.ascontiguousarray(tensor.read())
            file.write(array.reshape(-1).view(np.uint8).data)
            del array


def _header(tensors: Sequence[StoredTensor]) -> bytes:
    entries: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        entries[tensor.name] = {
            "dtype": _NAME_OF[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json_text.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
