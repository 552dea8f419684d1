"""Conversion of checkpoints between formats, one tensor at a time.

Every tensor keeps its name and shape. It keeps its type unless the options request another one, or quantization
(`jpaged.checkpoints.quantized.quantizer`). A tensor whose type is fixed by the model keeps that. Host memory holds one
tensor as it was read, and its copy in the written type if that differs. The destination appears under its name when it
is complete. Blocks of a GGUF file are written as dequantized weights.

The writer of Orbax folders is here and not next to the reader, because importing Orbax takes most of a second.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np
import orbax.checkpoint as ocp

from jpaged import json_text
from jpaged.checkpoints.gguf.file import is_gguf
from jpaged.checkpoints.gguf.tensors import read_model
from jpaged.checkpoints.gguf.tokenizer import read_tokenizer
from jpaged.checkpoints.hub import CONFIG_FILE, read_config, read_json, read_scheme
from jpaged.checkpoints.names import model_leaves
from jpaged.checkpoints.orbax import MANIFEST_FILE, PARAMS_FOLDER, is_orbax_folder, write_manifest
from jpaged.checkpoints.quantized.quantizer import ASKED, Rounded
from jpaged.checkpoints.tensor_files import (
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    StoredTensor,
    TensorSource,
    write_tensor_files,
)
from jpaged.checkpoints.weights import Progress, check_tensors, no_progress, open_tensors
from jpaged.errors import InvalidArgument, JpagedError, Unavailable
from jpaged.models.config import ModelConfig

CheckpointFormat = Literal["orbax", "safetensors"]
FORMATS: tuple[CheckpointFormat, ...] = get_args(CheckpointFormat)
WRITTEN_DTYPES = ("float32", "bfloat16", "float16")
MAX_SHARD_BYTES = 5 * 2**30
_MIN_SHARD_BYTES: Mapping[CheckpointFormat, int] = {"orbax": 2**20, "safetensors": 2**10}

# Files copied with the tensors: configs, tokenizer, chat templates, license.
_COMPANIONS = ("*.json", "*.jinja", "*.model", "*.txt", "*.md", "LICENSE*", "NOTICE*")
_NO_COMPANIONS = frozenset({INDEX_FILE, MANIFEST_FILE})
_MORE_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """Options of a conversion.

    Attributes:
        dtype: one of `WRITTEN_DTYPES` for all tensors; None keeps the type of each.
        max_shard_bytes: file size: a maximum for safetensors (5 GiB when None), except that a larger tensor has a
            separate file; approximate for Orbax (None for Orbax' default).
        force: replace a checkpoint at the destination.
        quantize: one of `ASKED`, to quantize the matrices of layers; None for no quantization.

    Raises:
        InvalidArgument: a value is none of those.
    """

    to: CheckpointFormat
    dtype: str | None = None
    max_shard_bytes: int | None = None
    force: bool = False
    quantize: str | None = None

    def __post_init__(self) -> None:
        if self.to not in FORMATS:
            raise InvalidArgument("to", f"{self.to!r} is not one of {', '.join(FORMATS)}")
        if self.dtype is not None and self.dtype not in WRITTEN_DTYPES:
            raise InvalidArgument("dtype", f"{self.dtype!r} is not one of {', '.join(WRITTEN_DTYPES)}")
        if self.quantize is not None and self.quantize not in ASKED:
            raise InvalidArgument("quantize", f"{self.quantize!r} is not one of {', '.join(ASKED)}")
        least = _MIN_SHARD_BYTES[self.to]
        if self.max_shard_bytes is not None and self.max_shard_bytes < least:
            raise InvalidArgument(
                "max_shard_size", f"{self.max_shard_bytes} bytes is below the limit for {self.to}, {least}"
            )


def on_host() -> None:
    """Keep jax from using an accelerator; for a process that only converts."""
    jax.config.update("jax_platforms", "cpu")


def convert_folder(
    source: Path, destination: Path, options: ConversionOptions, progress: Progress = no_progress
) -> None:
    """Convert a checkpoint folder in either format, or a GGUF file, to another folder.

    Args:
        source: with config.json, or a GGUF file.
        destination: a folder that does not exist, or is empty; parents are created.
        progress: called before each tensor with (number, total, name).

    Raises:
        InvalidArgument: the source is incomplete, the destination is taken or too small, or a number does not fit.
        Unsupported: the source has an unsupported model or format.
        Unavailable: the destination could not be written.
    """
    _check_apart(source, destination)
    config = read_config(source)
    with _open(source) as tensors:
        if is_gguf(source):
            config = dataclasses.replace(config, quantization=None)
        check_tensors(tensors, config, None if is_gguf(source) else read_scheme(source))
        with _new_folder(destination, options.force) as folder:
            _copy_companions(source, folder)
            if options.dtype is not None:
                if config.quantization is not None:
                    raise InvalidArgument(
                        "dtype", f"{options.dtype} cannot be applied to quantized weights: remove the option"
                    )
                _write_dtype(folder / CONFIG_FILE, options.dtype)
            _write(tensors, config, folder, options, progress)


def _open(source: Path) -> AbstractContextManager[TensorSource]:
    return nullcontext(read_model(source).tensors(as_weights=True)) if is_gguf(source) else open_tensors(source)


def _copy_companions(source: Path, folder: Path) -> None:
    """Copy the files of a model other than weights: configs, tokenizer, chat templates, license."""
    if is_gguf(source):
        _write_companions(source, folder)
        return
    names = {path.name for pattern in _COMPANIONS for path in source.glob(pattern) if path.is_file()}
    for name in sorted(names - _NO_COMPANIONS):
        if not name.endswith(".index.json"):
            shutil.copyfile(source / name, folder / name)
    if (source / _MORE_TEMPLATES).is_dir():
        shutil.copytree(source / _MORE_TEMPLATES, folder / _MORE_TEMPLATES)


def _write_companions(source: Path, folder: Path) -> None:
    """Write the metadata of a GGUF file as files of Hugging Face's libraries."""
    files = {CONFIG_FILE: dict(read_model(source).hf)}
    tokenizer = read_tokenizer(source)
    if tokenizer is not None:
        tokenizer.fast.save(str(folder / "tokenizer.json"))
        files["tokenizer_config.json"] = tokenizer.config()
    for name, value in files.items():
        (folder / name).write_text(json_text.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write(
    source: TensorSource, config: ModelConfig, folder: Path, options: ConversionOptions, progress: Progress
) -> None:
    rounded = None if options.quantize is None else Rounded.of(config, source, options.quantize)
    if rounded is not None:
        _write_config(folder / CONFIG_FILE, {"quantization_config": rounded.config()})
    leaves = model_leaves(config, source.names)
    every = itertools.chain(leaves.outer, *leaves.layers)
    kept = {name: leaf.dtype for leaf in every if leaf.dtype is not None for name, _ in leaf.tensors}
    tensors = _stored(source, options.dtype, kept, rounded, progress)
    needed, free = sum(tensor.nbytes for tensor in tensors), shutil.disk_usage(folder).free
    if needed > free:
        raise InvalidArgument(
            "destination",
            f"{folder.parent} has {free / 2**30:.2f} GiB free; the checkpoint takes {needed / 2**30:.2f} GiB",
        )
    if options.to == "safetensors":
        write_tensor_files(tensors, folder, options.max_shard_bytes or MAX_SHARD_BYTES)
        return
    write_orbax(tensors, folder, options.max_shard_bytes)
    dtypes = {tensor.dtype.name for tensor in tensors}
    write_manifest(folder, config.architecture, dtypes.pop() if len(dtypes) == 1 else "mixed")


def _stored(
    source: TensorSource,
    dtype: str | None,
    kept: Mapping[str, np.dtype],
    rounded: Rounded | None,
    progress: Progress,
) -> list[StoredTensor]:
    """Return every tensor to write, layer by layer; each is read, and cast or quantized, when it is written.

    Args:
        dtype: type to cast to; None keeps the stored types.
        kept: types of the tensors whose type is fixed by the model.
    """
    names = sorted(source.names, key=_natural_order)
    matrices = {} if rounded is None else rounded.matrices
    tensors: list[StoredTensor] = []
    for name in names:
        have = source.dtype(name)
        want = have if dtype is None else kept.get(name, DTYPES[dtype])
        if rounded is not None and name in matrices:
            tensors += rounded.tensors(source, name, want)
        else:
            read = functools.partial(_read_cast, source, name, want)
            tensors.append(StoredTensor(name, source.shape(name), want, read))
    turns = iter(range(1, len(tensors) + 1))

    def told(tensor: StoredTensor) -> StoredTensor:
        def read() -> np.ndarray:
            progress(next(turns), len(tensors), tensor.name)
            return tensor.read()

        return dataclasses.replace(tensor, read=read)

    return [told(tensor) for tensor in tensors]


def _read_cast(source: TensorSource, name: str, dtype: np.dtype) -> np.ndarray:
    return _cast(source.read(name, source.shape(name)), dtype, name)


def _natural_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _cast(tensor: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    if tensor.dtype == dtype:
        return tensor
    with np.errstate(over="ignore"):
        cast = tensor.astype(dtype)
    num_lost = int(np.count_nonzero(np.isinf(cast))) - int(np.count_nonzero(np.isinf(tensor)))
    if num_lost:
        raise InvalidArgument("dtype", f"{dtype.name} cannot represent {num_lost} numbers of tensor {name}")
    return cast


def _write_dtype(path: Path, dtype: str) -> None:
    """Set the type of the tensors in a config.json; checkpoints use one of two keys, or both."""
    config = read_json(path)
    keys = [key for key in ("torch_dtype", "dtype") if key in config] or ["dtype"]
    _write_config(path, dict.fromkeys(keys, dtype))


def _write_config(path: Path, values: Mapping[str, object]) -> None:
    """Set values in a config.json."""
    path.write_text(json_text.dumps({**read_json(path), **values}, indent=2) + "\n", encoding="utf-8")


def _check_apart(source: Path, destination: Path) -> None:
    here, there = source.resolve(), destination.resolve()
    if here.is_relative_to(there) or there.is_relative_to(here):
        raise InvalidArgument("destination", f"{destination} is the source {source}, contains it, or is inside it")


@contextmanager
def _new_folder(destination: Path, force: bool) -> Iterator[Path]:
    """Yield a new folder that replaces the destination if the block succeeds, and is removed otherwise."""
    destination = destination.absolute()
    _check_free(destination, force)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{destination.name}.", suffix=".unfinished", dir=destination.parent
        ) as scratch:
            folder = Path(scratch) / "new"
            folder.mkdir()
            yield folder
            if destination.exists():
                destination.rename(Path(scratch) / "old")
            folder.rename(destination)
    except JpagedError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise Unavailable(f"{destination} could not be written and was removed: {error}") from error


def _check_free(destination: Path, force: bool) -> None:
    if not destination.exists() and not destination.is_symlink():
        return
    if not destination.is_dir() or destination.is_symlink():
        raise InvalidArgument("destination", f"{destination} exists and is not a folder")
    if not any(destination.iterdir()):
        return
    if not force:
        raise InvalidArgument("destination", f"{destination} exists and is not empty; --force replaces a checkpoint")
    is_checkpoint = is_orbax_folder(destination) or any(
        (destination / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)
    )
    if not is_checkpoint:
        raise InvalidArgument(
            "destination", f"{destination} contains something other than a checkpoint; remove it first"
        )


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
            for written in await super().serialize([np.asarray(value.read(), order="C")], [info], [arg]):
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
