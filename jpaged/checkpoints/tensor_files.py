"""The safetensors files of one checkpoint folder: which tensors are there, and one of them at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jpaged.checkpoints.tensor_source import ALL_DTYPES, DTYPES, check_shape, unreadable, unsupported_dtype
from jpaged.errors import InvalidArgument, Unsupported

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

ORIGINAL_FILE, ORIGINAL_CONFIG = "consolidated.safetensors", "params.json"
ORIGINAL_PROBLEM = (
    f"{ORIGINAL_FILE} with {ORIGINAL_CONFIG} is Mistral's own layout, which is not read: download the files in Hugging "
    f"Face's layout (config.json and {SINGLE_FILE}) of the same model"
)

FORMAT_DTYPES: Mapping[str, np.dtype] = {
    "F64": DTYPES["float64"],
    "F32": DTYPES["float32"],
    "F16": DTYPES["float16"],
    "BF16": DTYPES["bfloat16"],
    "I8": ALL_DTYPES["int8"],
    "U8": ALL_DTYPES["uint8"],
    "I32": ALL_DTYPES["int32"],
    "I64": ALL_DTYPES["int64"],
    "F8_E4M3": ALL_DTYPES["float8_e4m3fn"],
    "F8_E8M0": ALL_DTYPES["float8_e8m0fnu"],
}
"""Types by the names that the format has for them."""


class TensorFiles:
    """Open checkpoint files, memory-mapped, as a `TensorSource`.

    A folder holds either one `model.safetensors`, which wins, or the shards that `model.safetensors.index.json`
    names. Files that are neither are not looked at.

    Args:
        opened: closes the files.
        single: the name of the one file, where it is another.

    Raises:
        InvalidArgument: a file is missing or broken, or the index and the shards disagree.
        Unsupported: the weights are there in another format only.
    """

    def __init__(self, folder: Path, opened: ExitStack, single: str = SINGLE_FILE) -> None:
        self._folder = folder
        self._opened = opened
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        if (folder / single).is_file():
            self._open_file(single)
        elif (self._folder / INDEX_FILE).is_file():
            self._open_shards()
        elif dangling := next((path for path in map(folder.joinpath, (single, INDEX_FILE)) if path.is_symlink()), None):
            raise unreadable(dangling, "is missing")
        elif (folder / ORIGINAL_FILE).is_file():
            raise Unsupported(f"{folder}: {ORIGINAL_PROBLEM}")
        elif list(self._folder.glob("*.bin")) or list(self._folder.glob("*.pth")):
            raise Unsupported(f"{self._folder}: only safetensors weights are read; convert the checkpoint")
        else:
            raise InvalidArgument(str(self._folder), f"has neither {SINGLE_FILE} nor {INDEX_FILE}")

    @property
    def names(self) -> frozenset[str]:
        """Every tensor of the checkpoint."""
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the header of its file."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> np.dtype:
        """The type of a tensor, from the header of its file; Unsupported when it is not among `FORMAT_DTYPES`."""
        stored = self._slice(name).get_dtype()
        if stored not in FORMAT_DTYPES:
            raise unsupported_dtype(self.where(name), name, stored)
        return FORMAT_DTYPES[stored]

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> np.ndarray:
        """See `TensorSource.read`; of a part nothing else is read from the file."""
        check_shape(self, name, shape)
        dtype = self.dtype(name)
        if dtype.name.startswith("float8"):
            return self._mapped(name, dtype)[index]
        return np.asarray(self._slice(name)[index] if index else self._files[self._file_of[name]].get_tensor(name))

    def where(self, name: str) -> Path:
        """The file that holds a tensor, or the folder when none does."""
        return self._folder / self._file_of[name] if name in self._file_of else self._folder

    def _mapped(self, name: str, dtype: np.dtype) -> np.ndarray:
        """A tensor of a type that numpy, and so the library, has no name for: its bytes, and ours for them."""
        path = self.where(name)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            begin, end = json.loads(file.read(length))[name]["data_offsets"]
        tensor = (
            np.memmap(path, np.uint8, "r", 8 + length + begin, end - begin) if end > begin else np.empty(0, np.uint8)
        )
        return np.asarray(tensor).view(dtype).reshape(self.shape(name))

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(name)

    def _open_file(self, file_name: str) -> None:
        path = self._folder / file_name
        if path.is_symlink() and not path.exists():
            raise unreadable(path, "is missing")
        if Path(file_name).name != file_name or not path.is_file():
            raise InvalidArgument(str(self._folder / INDEX_FILE), f"names {file_name!r}, which is not in the folder")
        try:
            file = self._opened.enter_context(safe_open(path, framework="numpy"))
        except SafetensorError as error:
            raise unreadable(path, f"is not a whole safetensors file: {error}") from error
        self._files[file_name] = file
        for name in list(file.keys()):
            if name in self._file_of:
                raise InvalidArgument(str(path), f"tensor {name} is in {self._file_of[name]} as well")
            self._file_of[name] = file_name

    def _open_shards(self) -> None:
        path = self._folder / INDEX_FILE
        try:
            index = json.loads(path.read_text(encoding="utf-8-sig"))["weight_map"]
            wanted = {str(name): str(file_name) for name, file_name in index.items()}
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise unreadable(path, f"must be a JSON object with a weight_map: {error!r}") from error
        for file_name in sorted(set(wanted.values())):
            self._open_file(file_name)
        # As in transformers the shards hold what there is: an index may omit tensors, or name another shard.
        for name in sorted(wanted.keys() - self._file_of.keys()):
            raise InvalidArgument(str(path), f"puts tensor {name} into {wanted[name]}; it is in no shard")
