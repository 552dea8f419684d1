"""Reader of checkpoint folders with Orbax tensors.

    FOLDER/jpaged.json             the manifest: format and its version, architecture, type, version of the writer
    FOLDER/config.json, ...        Hugging Face layout: config, generation config, tokenizer, chat template
    FOLDER/params/                 Orbax (OCDBT, zarr3): {tensor name: array}

Tensors have the names and shapes of Hugging Face, complete and as published. Nothing in the folder depends on a mesh or
on how layers run, so any mesh restores it, with the same code that reads safetensors. The tensors are stored in chunks
of at most a MiB, cut along both axes. A device's slice is read through tensorstore, chunk by chunk.

The manifest is written last, into a folder that gets its name when everything is complete.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from jpaged import json_text
from jpaged.checkpoints.tensor_files import (
    ALL_DTYPES,
    MAX_INDEX_BYTES,
    check_shape,
    read_bounded,
    require_bounded,
    unsupported_dtype,
)
from jpaged.errors import InvalidArgument
from jpaged.version import __version__

MANIFEST_FILE = "jpaged.json"
PARAMS_FOLDER = "params"
MAX_MANIFEST_BYTES = 1 << 20

_FORMAT = "jpaged-orbax"
_FORMAT_VERSION = 1
_UNREADABLE = (OSError, ValueError, LookupError, RuntimeError)
"""Errors of tensorstore, which has no error class."""
_SIGNS_OF_ORBAX = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")


def write_manifest(folder: Path, architecture: str, dtype: str) -> None:
    """Write the manifest, which makes a folder readable, last; dtype is that of the tensors, or `mixed`."""
    value = {
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        "architecture": architecture,
        "dtype": dtype,
        "jpaged_version": __version__,
    }
    (folder / MANIFEST_FILE).write_text(json_text.dumps(value, indent=2) + "\n", encoding="utf-8")


def _check_manifest(path: Path) -> None:
    try:
        value = json.loads(read_bounded(path, MAX_MANIFEST_BYTES))
    except InvalidArgument:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(str(path), f"cannot be read as JSON: {error}") from error
    if not isinstance(value, dict) or value.get("format") != _FORMAT:
        raise InvalidArgument(str(path), f"must be a JSON object whose format is {_FORMAT!r}")
    if value.get("format_version") != _FORMAT_VERSION:
        raise InvalidArgument(
            str(path),
            f"format_version is {value.get('format_version')!r}; this version of jpaged supports {_FORMAT_VERSION}: "
            "convert the checkpoint again",
        )
    for name in ("architecture", "dtype", "jpaged_version"):
        if not isinstance(value.get(name), str):
            raise InvalidArgument(str(path), f"{name} is {value.get(name)!r}; it must be a string")


def is_orbax_folder(folder: Path) -> bool:
    """Return True if a folder is a complete Orbax checkpoint of jpaged."""
    return (folder / MANIFEST_FILE).is_file()


def refuse_other_orbax(folder: Path) -> None:
    """Raise an error if a folder is an Orbax checkpoint that cannot be read.

    Raises:
        InvalidArgument: Orbax wrote it, and `jpaged convert` did not, or was interrupted.
    """
    if is_orbax_folder(folder):
        return
    for place in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        if any((place / sign).exists() for sign in _SIGNS_OF_ORBAX) or ".orbax-checkpoint-tmp" in place.name:
            raise InvalidArgument(
                str(folder),
                f"holds an Orbax checkpoint but no {MANIFEST_FILE}: `jpaged convert` did not write it, or was "
                "interrupted; convert the model again",
            )


class OrbaxTensors:
    """The tensors of an Orbax folder, as a `TensorSource`.

    Raises:
        InvalidArgument: the manifest or Orbax' list of arrays is missing or broken, or of an unknown version.
    """

    def __init__(self, folder: Path) -> None:
        _check_manifest(folder / MANIFEST_FILE)
        self._folder = folder / PARAMS_FOLDER
        for path in self._folder.glob("**/manifest.ocdbt"):
            require_bounded(path, MAX_INDEX_BYTES)
        import tensorstore as ts

        self._context = ts.Context()
        self._arrays: dict[str, Any] = {}
        self.names = _names(self._folder)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from its metadata."""
        return tuple(self._array(name).shape)

    def dtype(self, name: str) -> np.dtype:
        """Return the type of a tensor, from its metadata. Raise Unsupported if it is not among `ALL_DTYPES`."""
        stored = str(self._array(name).dtype.name)
        if stored not in ALL_DTYPES:
            raise unsupported_dtype(self.where(name), name, stored)
        return ALL_DTYPES[stored]

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> np.ndarray:
        """See `TensorSource.read`; for a part it reads the chunks that overlap it."""
        check_shape(self, name, shape)
        self.dtype(name)
        try:
            return np.asarray(self._array(name)[index or ...].read().result())
        except _UNREADABLE as error:
            raise self._unreadable(name, error) from error

    def where(self, name: str) -> Path:
        """Return the folder of all arrays: several may share a file."""
        return self._folder

    def _array(self, name: str) -> Any:
        import tensorstore as ts

        if name not in self._arrays:
            base = {"driver": "file", "path": f"{self._folder.resolve()}/"}
            spec = {
                "driver": "zarr3",
                "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"},
                "fill_missing_data_reads": False,
            }
            try:
                self._arrays[name] = ts.open(spec, open=True, read=True, context=self._context).result()
            except _UNREADABLE as error:
                raise self._unreadable(name, error) from error
        return self._arrays[name]

    def _unreadable(self, name: str, error: Exception) -> InvalidArgument:
        return InvalidArgument(str(self._folder), f"tensor {name} cannot be read: {error}")


def _names(folder: Path) -> frozenset[str]:
    """Return the names in Orbax' list of arrays.

    Orbax' reader requests all arrays at once. If one is broken, results of others reach a closed event loop, which
    sometimes prints tracebacks of other threads.
    """
    path = folder / "_METADATA"
    if not path.is_file():
        raise InvalidArgument(str(folder), "has no Orbax arrays; convert the checkpoint again")
    try:
        entries = json.loads(read_bounded(path, MAX_INDEX_BYTES))["tree_metadata"].values()
        paths = [[key["key"] for key in entry["key_metadata"]] for entry in entries]
        return frozenset(str(name) for (name,) in paths)
    except InvalidArgument:
        raise
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(str(folder), f"cannot be read as an Orbax checkpoint: {error!r}") from error
