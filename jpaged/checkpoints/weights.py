"""Checkpoint files -> parameter trees, one leaf at a time: never a second copy of the model in host memory."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jpaged.checkpoints.finite import check_finite, refuse_tensor
from jpaged.checkpoints.gguf.file import is_gguf
from jpaged.checkpoints.gguf.tensors import GgufScheme, GgufTensors, get_columns, read_model
from jpaged.checkpoints.hub import CONFIG_FILE, read_json, read_scheme
from jpaged.checkpoints.names import check_tie, is_ignored, model_leaves
from jpaged.checkpoints.orbax import OrbaxTensors, is_orbax_folder, refuse_other_orbax
from jpaged.checkpoints.quantized.compressed_tensors import CompressedTensors
from jpaged.checkpoints.quantized.floats import BitsAndBytesTensors, ModelOptNvfp4
from jpaged.checkpoints.quantized.gptq import Gptq
from jpaged.checkpoints.quantized.leaf import Dequantized, LeafPart, ReadMatrix, is_input_first, quantized_leaf
from jpaged.checkpoints.quantized.quantizer import round_matrix
from jpaged.checkpoints.quantized.scheme import (
    KV_SCALES,
    OF_KV_CACHE,
    Scheme,
    StoredMatrix,
    check_parts,
    find_kv_scales,
    read_matrix,
)
from jpaged.checkpoints.tensor_files import (
    DTYPES,
    ArrayTensors,
    TensorFiles,
    TensorSource,
    check_shape,
    read_integers,
    read_weight,
    unsupported_dtype,
)
from jpaged.errors import InternalError, InvalidArgument, Unsupported
from jpaged.kernels.matmul.packed import PackedMatrix, StoredColumns, empty_array
from jpaged.kernels.matmul.quantized import QuantizedMatrix, abstract_matrix
from jpaged.kernels.matrix_format import LARGEST, VALUE_DTYPES, MatrixFormat
from jpaged.models.config import ModelConfig, Quantization, VisionConfig
from jpaged.models.eagle import EagleConfig, mtp_config, stored_mtp
from jpaged.models.hf_config import head_from_hf
from jpaged.models.layer_kinds import get_stacks
from jpaged.models.layers import Params, normal
from jpaged.models.model import Model, insert
from jpaged.models.param_specs import EXPERT_AXES, Leaf, contracted_axis, get_module, leaf_format, stored_formats
from jpaged.models.registry import find_family
from jpaged.models.sharding import PaddedAxis, padded_axis
from jpaged.models.stack import LayerMode
from jpaged.models.vision.config import vision_leaves

# Path of a leaf in the tree: ("layers", 3, "mlp", "down", "kernel"); in scan mode with the name of a stack.
LeafPath = tuple[str | int, ...]
LeafGroup = tuple[LeafPath, Sequence[Leaf]]
# Returns a part of a leaf as a new array, given a slice for each axis.
Read = Callable[[tuple[slice, ...]], np.ndarray]
Progress = Callable[[int, int, str], None]
# Packs a leaf from its file, or returns None; the matrix has shapes as arrays.
PackStored = Callable[[LeafPath, QuantizedMatrix, StoredColumns], PackedMatrix | None]
_LOG = logging.getLogger(__name__)
_MAX_SHOWN = 5


def no_progress(done: int, total: int, name: str) -> None:
    """Do nothing."""


_CONSTANTS = {"scale": 1.0, "bias": 0.0, "scales": 5e-4, "zeros": 0.0, "group_ids": 0.0, "input_scale": 0.05}
"""Leaves with constant values. Others are random; low-bit values have a deviation of a third of the maximum."""


def random_params(model: Model, layer_mode: LayerMode, *, seed: int, shardings: Params) -> Params:
    """Return random parameters for measurements without a checkpoint, distributed as in `model.init_params`.

    Each device generates its parts, one leaf at a time: a single program for all leaves would hold the random bits of
    every device's parts on each device (26 GiB, where an 8B model in eight parts has 2 GiB a device).
    """
    abstract, tree = jax.tree_util.tree_flatten_with_path(model.abstract_params(layer_mode))
    leaves = []
    for index, ((path, leaf), placed) in enumerate(zip(abstract, jax.tree.leaves(shardings), strict=True)):
        make = _leaf_maker(_CONSTANTS.get(_last_key(path)), leaf.shape, leaf.dtype, placed)
        leaves.append(make(np.uint32(seed % 2**32), np.uint32(index)))
    params: Params = jax.tree.unflatten(tree, leaves)
    return params


def _last_key(path: tuple[jax.tree_util.KeyEntry, ...]) -> str:
    last = path[-1]
    if isinstance(last, jax.tree_util.GetAttrKey):
        return last.name
    return str(last.key) if isinstance(last, jax.tree_util.DictKey) else ""


@functools.lru_cache(maxsize=64)
def _leaf_maker(
    constant: float | None, shape: tuple[int, ...], dtype: np.dtype, placed: NamedSharding | Format
) -> Callable[[np.uint32, np.uint32], jax.Array]:
    sharding = placed.sharding if isinstance(placed, Format) else placed
    assert isinstance(sharding, NamedSharding)
    local_shape = sharding.shard_shape(shape)

    def make(seed: jax.Array, index: jax.Array) -> jax.Array:
        if constant is not None:
            return jnp.full(local_shape, constant, dtype)
        # A threefry key takes minutes to compile for large arrays on a CPU; these numbers need no cryptographic
        # quality.
        key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), index)
        for axis in sharding.spec:
            key = key if axis is None else jax.random.fold_in(key, jax.lax.axis_index(axis))
        if dtype.itemsize == 1:
            largest = LARGEST[next(name for name, other in VALUE_DTYPES.items() if other == dtype)]
            return jnp.clip(jax.random.normal(key, local_shape) * (largest / 3), -largest, largest).astype(dtype)
        return normal(key, local_shape, dtype)

    whole = PartitionSpec()
    return jax.jit(
        jax.shard_map(make, mesh=sharding.mesh, in_specs=(whole, whole), out_specs=sharding.spec, check_vma=False),
        out_shardings=placed,
    )


def load_params(
    model: Model,
    folder: Path,
    layer_mode: LayerMode,
    *,
    num_parts: int = 1,
    shardings: Params | None = None,
    progress: Progress = no_progress,
    pack_stored: PackStored | None = None,
) -> Params:
    """Load a checkpoint folder (safetensors or Orbax) or a GGUF file into the tree of `abstract_params(layer_mode)`.

    Host memory holds one leaf at a time (in scan mode, that leaf for all layers) and the tensors of the part that is
    being built. For safetensors only the rows of the part are read, for Orbax the chunks that overlap it.

    Args:
        model: the published model; leaves are cast to its dtype.
        layer_mode: one tree a layer, or one with stacked leaves.
        num_parts: the tree is that of the model padded for this number of parts (`jpaged.models.sharding`).
        shardings: a tree of shardings; only parts of this process's devices are read. None for the default device.
        progress: called after each leaf with (done, total, name).
        pack_stored: packs matrices of a GGUF file without decoding them to arrays first; the tree has its results.

    Raises:
        InvalidArgument: a tensor is missing, superfluous, misshapen, not finite or not tied as promised; it is named,
            with its file.
        Unsupported: the weights are in an unsupported format or type.
    """
    config, quantization = model.config, model.config.quantization
    params: Params = {"layers": {} if layer_mode == "scan" else [{} for _ in range(config.num_layers)]}
    keeps_embedding = quantization is None or quantization.has_embedding
    with open_tensors(folder, keeps_embedding=keeps_embedding) as files:
        scheme = read_scheme(folder, keeps_embedding=keeps_embedding)
        _log_widening(folder, scheme, files, keeps_embedding)
        groups = _leaf_groups(config, files.names, layer_mode)
        _check_names(files, groups, config, scheme)
        reader = LeafReader(model, files, scheme, num_parts=num_parts, shardings=shardings, pack_stored=pack_stored)
        for done, group in enumerate(groups, start=1):
            insert(params, group[0], reader.read(group))
            progress(done, len(groups), ".".join(map(str, group[0])))
        check_tie(files, config)
        reader.require_finite()
    return params


def read_kv_scales(folder: Path, config: ModelConfig, *, is_fp8: bool) -> np.ndarray | None:
    """Return a checkpoint's scales for an fp8 KV cache, see `find_kv_scales`; for another cache log that they exist."""
    if is_gguf(folder):
        return None
    with open_tensors(folder) as files:
        if is_fp8:
            return find_kv_scales(files, model_leaves(config, files.names).layers)
        if any(name.endswith(tuple(KV_SCALES)) for name in files.names):
            _LOG.info("checkpoint: its scales of keys and values are only used with --kv-cache-dtype fp8")
    return None


def load_vision(config: VisionConfig, folder: Path, dtype: np.dtype, device: jax.Device) -> Params:
    """Load the vision encoder of a checkpoint; leaves of layers are stacked.

    Raises:
        InvalidArgument: a tensor is missing, misshapen or not finite; it is named, with its file.
        Unsupported: a tensor has an unsupported type, such as a quantized one.
    """
    params: Params = {}
    with open_tensors(folder) as files:
        leaves = vision_leaves(config, files.names)
        groups: list[LeafGroup] = [(leaf.path, (leaf,)) for leaf in leaves.outer]
        groups += [(("layers", *of_each[0].path), of_each) for of_each in zip(*leaves.layers, strict=True)]
        for path, of_place in groups:
            own = of_place[0].dtype or dtype
            source = _LeafSource(files, of_place, path[0] == "layers", own, None)
            array = put(source.shape, source.read, SingleDeviceSharding(device))
            if not check_finite(array)():
                _refuse_not_finite(files, of_place, own)
            insert(params, path, array)
    return params


def params_from_arrays(model: Model, arrays: Mapping[str, jax.Array], layer_mode: LayerMode = "loop") -> Params:
    """Return the tree that `Model.run` takes, in the model's type, from arrays by Hugging Face's names.

    It can be jitted and differentiated: a trainer keeps its weights by the names that `LLM.update_weights` takes.

    Raises:
        InvalidArgument: an array is missing, unknown or misshapen.
        Unsupported: the model is quantized.
    """
    if model.config.quantization is not None:
        raise Unsupported("params_from_arrays: the model is quantized; its weights have no gradient")
    params: Params = {"layers": {} if layer_mode == "scan" else [{} for _ in range(model.config.num_layers)]}
    groups = _leaf_groups(model.config, arrays.keys(), layer_mode)
    wanted = {name: shape for _, leaves in groups for leaf in leaves for name, shape in leaf.tensors}
    for name in sorted(wanted.keys() ^ arrays.keys()):
        if name not in wanted and is_ignored(name, model.config):
            continue
        problem = "is missing" if name in wanted else f"is not part of {model.config.architecture}"
        raise InvalidArgument("arrays", f"{name} {problem}")
    for name, shape in wanted.items():
        if arrays[name].shape != shape:
            raise InvalidArgument("arrays", f"{name} has shape {list(arrays[name].shape)}, not {list(shape)}")
    for path, leaves in groups:
        source = _LeafSource(
            ArrayTensors({}), leaves, layer_mode == "scan" and path[0] == "layers", leaves[0].dtype or model.dtype, None
        )
        insert(params, path, source.trace([arrays[name] for leaf in leaves for name, _ in leaf.tensors]))
    return params


class LeafReader:
    """Builds the leaves of the padded tree from the tensors of a source; see `load_params`.

    Args:
        packer: packs leaves of JAX arrays on their devices; None copies them to the host first.
        keeps_rows: kernels are returned as NumPy arrays whose first axis is adjacent in memory, as in the files.
    """

    def __init__(
        self,
        model: Model,
        files: TensorSource,
        scheme: Scheme | None,
        *,
        num_parts: int,
        shardings: Params | None,
        pack_stored: PackStored | None,
        packer: DevicePacker | None = None,
        keeps_rows: bool = False,
    ) -> None:
        quantization = model.config.quantization
        self._files = files
        self._scheme = scheme
        self._dtype = model.dtype
        self._num_parts = num_parts
        self._shardings = shardings
        self._pack_stored = pack_stored
        self._packer = packer
        self._keeps_rows = keeps_rows and num_parts == 1
        self._split = None if quantization is None else quantization.split(num_parts)
        self._read_matrix = _read_matrix(files, scheme, quantization, model.dtype)
        self._checks: list[tuple[Callable[[], bool], Sequence[Leaf], TensorSource]] = []

    def read(self, group: LeafGroup) -> Any:
        """Return a leaf on its devices."""
        path, leaves = group
        is_stacked = path[0] == "layers" and not isinstance(path[1], int)
        split = padded_axis(leaves[0], self._num_parts)
        placed = None if self._shardings is None else _find(self._shardings, path)
        form, dtype = leaf_format(self._split, leaves[0]), self._dtype
        if form is not None and self._pack_stored is not None and not is_stacked and self._num_parts == 1:
            packed = _packed_leaf(self._pack_stored, self._files, self._scheme, path, leaves[0], form, dtype)
            if packed is not None:
                return packed
        if form is not None:
            parts = quantized_leaf(self._read_matrix, leaves, form, is_stacked=is_stacked, split=split, dtype=dtype)
            return _put_parts(parts, placed)
        weights = self._files if self._scheme is None else Dequantized(self._files, self._scheme, tuple(leaves))
        source = _LeafSource(weights, leaves, is_stacked, leaves[0].dtype or dtype, split)
        array: Any = None
        has_rows = path[-1] == "kernel" and leaves[0].axes[0] not in EXPERT_AXES and source.shape == leaves[0].shape
        if self._keeps_rows and has_rows:
            array = source.read_rows()
        elif self._packer is not None and weights is self._files and isinstance(placed, NamedSharding | Format):
            array = self._packer.pack(source, path, placed)
        if array is None:
            array = put(source.shape, source.read, placed)
        self._checks.append((check_finite(array), leaves, weights))
        return array

    def require_finite(self) -> None:
        """Raise InvalidArgument if a leaf that was read is not finite; names the tensor."""
        checks, self._checks = self._checks, []
        for is_finite, leaves, weights in checks:
            if not is_finite():
                _refuse_not_finite(weights, leaves, self._dtype)


class DevicePacker:
    """Packs leaves of JAX arrays on their devices, with programs that are compiled once for each kind of leaf.

    A leaf is packed by the same function as on the host (`Leaf.pack`), traced.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._programs: dict[tuple[object, ...], Callable[..., jax.Array] | None] = {}

    def pack(self, source: _LeafSource, path: LeafPath, placed: NamedSharding | Format) -> jax.Array | None:
        """Return a leaf as `_LeafSource.read`, or None if its arrays are in host memory or need NumPy."""
        names = [name for leaf in source.leaves for name, _ in leaf.tensors]
        arrays = source.files.on_device(names) if isinstance(source.files, ArrayTensors) else None
        if arrays is None:
            return None
        sharding = placed.sharding if isinstance(placed, Format) else placed
        assert isinstance(sharding, NamedSharding)
        assert isinstance(sharding.mesh, Mesh)
        is_layer = path[0] == "layers" and isinstance(path[1], int)
        kind = (self._config.layer_kinds[int(path[1])], path[2:]) if is_layer else path
        key = kind, placed, tuple((array.shape, array.dtype) for array in arrays)
        if key in self._programs and self._programs[key] is None:
            return None
        if (build := self._programs.get(key)) is None:
            without_arrays = dataclasses.replace(source, files=ArrayTensors({}))
            build = self._programs[key] = jax.jit(without_arrays.trace, out_shardings=placed)
        try:
            return build([_on_mesh(array, sharding.mesh) for array in arrays])
        except jax.errors.TracerArrayConversionError:  # the packing calls functions of NumPy
            self._programs[key] = None
            return None


def _on_mesh(array: jax.Array, mesh: Mesh) -> jax.Array:
    """Return an array on the devices of a mesh, in their order: as it is, or whole on each of them."""
    sharding = array.sharding
    if isinstance(sharding, NamedSharding) and [*sharding.mesh.devices.flat] == [*mesh.devices.flat]:
        return array
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec()))


class _TracedLeaf:
    """An array that `Leaf.pack` fills while it is traced: assignments to it and its views are recorded.

    Args:
        value: of the leaf.
    """

    def __init__(self, value: jax.Array, write: Callable[[jax.Array], None] | None = None) -> None:
        self.value = value
        self._write = write

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.value.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.value.ndim

    @property
    def dtype(self) -> np.dtype:
        """Type of the numbers."""
        return self.value.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[_TracedLeaf]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> _TracedLeaf:
        return _TracedLeaf(self.value[index], lambda part: self._set(self.value.at[index].set(part)))

    def __setitem__(self, index: Any, part: Any) -> None:
        part = jnp.asarray(part).astype(self.dtype)
        num_axes = self.value[index].ndim
        part = part.reshape(part.shape[max(0, part.ndim - num_axes) :])  # NumPy drops leading axes of one element
        self._set(self.value.at[index].set(part))

    def reshape(self, *shape: int) -> _TracedLeaf:
        """Return a view of another shape."""
        own = self.shape
        return _TracedLeaf(self.value.reshape(shape), lambda part: self._set(part.reshape(own)))

    def _set(self, value: jax.Array) -> None:
        self.value = value
        if self._write is not None:
            self._write(value)


class CheckpointUpdate:
    """Checked weights of a running model, which are not in use yet.

    Attributes:
        is_complete: every leaf of the model is in it.
        folder: its folder; None for arrays.
        kv_scales_l2: see `find_kv_scales`; None if the KV cache has no use for them.

    Args:
        opened: the files.
    """

    def __init__(
        self,
        reader: LeafReader,
        groups: Sequence[LeafGroup],
        opened: ExitStack,
        *,
        folder: Path | None,
        is_complete: bool,
        kv_scales_l2: np.ndarray | None,
    ) -> None:
        self.kv_scales_l2 = kv_scales_l2
        self.is_complete = is_complete
        self.folder = folder
        self.close = opened.close
        self._reader = reader
        self._groups = groups

    def leaves(self) -> Iterator[tuple[LeafPath, Any]]:
        """Yield each leaf with its path; after the last one, check that all are finite.

        Raises:
            InvalidArgument: a tensor is not finite, or its file has changed; names it.
        """
        for group in self._groups:
            yield group[0], self._reader.read(group)
        self._reader.require_finite()


@dataclass(slots=True)
class WeightReader:
    """Reads the weights of a running model again, or others.

    Attributes:
        folder: of the model, or of the last complete update from a folder.
        num_parts, shardings, pack_stored: see `load_params`.
        check_folder: raises an error if a folder has the config of another model.
        packs_on_device: JAX arrays are packed on their devices.
        has_kv_scales: the KV cache is fp8, so it takes a checkpoint's scales.
        placeholder: returns the weights of a model that was loaded without its files; None if it was not.
    """

    model: Model
    folder: Path
    layer_mode: LayerMode
    num_parts: int
    shardings: Params
    pack_stored: PackStored | None
    check_folder: Callable[[Path], None]
    packs_on_device: bool
    has_kv_scales: bool = False
    placeholder: Callable[[], Params] | None = None
    _published: Path = dataclasses.field(init=False)
    _packer: DevicePacker | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._published = self.folder
        self._packer = DevicePacker(self.model.config) if self.packs_on_device else None

    def read(self) -> Params:
        """Return the weights of the model's folder, or of the last one that `set_folder` named."""
        if self.placeholder is not None:
            return self.placeholder()
        return load_params(
            self.model,
            self.folder,
            self.layer_mode,
            num_parts=self.num_parts,
            shardings=self.shardings,
            pack_stored=self.pack_stored,
        )

    def set_folder(self, folder: Path) -> None:
        """Let `read` use another folder."""
        self.folder, self.placeholder = folder, None

    def open(self, weights: object) -> CheckpointUpdate:
        """Check the names, shapes and types of new weights.

        Args:
            weights: a folder or GGUF file, or arrays as `ArrayTensors` takes them. They may have some of the model's
                tensors; then they must have all tensors of each leaf of which they have one.

        Raises:
            InvalidArgument: a tensor is missing, unknown or misshapen, or the folder is not of this model.
            Unsupported: the weights are in an unsupported format or type.
        """
        with ExitStack() as opened:
            config, quantization = self.model.config, self.model.config.quantization
            keeps_embedding = quantization is None or quantization.has_embedding
            described, folder, files = self._published, None, None
            if isinstance(weights, str | os.PathLike):
                folder = _existing(weights)
                if is_gguf(folder) or (folder / CONFIG_FILE).is_file():
                    self.check_folder(folder)
                    described = folder
                files = opened.enter_context(open_tensors(folder, keeps_embedding=keeps_embedding))
            elif isinstance(weights, Mapping | Iterable):
                if is_gguf(described):
                    raise Unsupported("weights: a model from a GGUF file is updated from such a file, not from arrays")
                files = ArrayTensors(weights)
            else:
                raise InvalidArgument("weights", f"is a {type(weights).__name__}, not a folder or arrays by name")
            scheme = read_scheme(described, keeps_embedding=keeps_embedding)
            every = _leaf_groups(config, files.names, self.layer_mode)
            if isinstance(files, ArrayTensors):
                _refuse_unknown(files, every, config, scheme)
            else:
                _check_names(files, every, config, scheme)
            groups = _select_groups(files, every, scheme)
            _check_types(files, [leaf for _, leaves in groups for leaf in leaves], scheme)
            check_tie(files, config)
            reader = LeafReader(
                self.model,
                files,
                scheme,
                num_parts=self.num_parts,
                shardings=self.shardings,
                pack_stored=self.pack_stored,
                packer=self._packer,
                keeps_rows=not self.packs_on_device,
            )
            scales = find_kv_scales(files, model_leaves(config, files.names).layers) if self.has_kv_scales else None
            complete = len(groups) == len(every)
            return CheckpointUpdate(
                reader, groups, opened.pop_all(), folder=folder, is_complete=complete, kv_scales_l2=scales
            )


def _existing(given: str | os.PathLike[str]) -> Path:
    """Return a path. Raise InvalidArgument if it is empty, does not exist or is not accessible."""
    if not os.fspath(given):
        raise InvalidArgument("weights", "is an empty path")
    try:
        if Path(given).exists():
            return Path(given)
    except OSError as error:  # the name is too long, or a folder is not accessible
        raise InvalidArgument("weights", f"{str(given)[:80]}: {error.strerror}") from error
    raise InvalidArgument("weights", f"{given} does not exist")


def _refuse_unknown(
    files: TensorSource, groups: Sequence[LeafGroup], config: ModelConfig, scheme: Scheme | None
) -> None:
    """Raise InvalidArgument if a tensor is not part of the model."""
    known = {name for _, leaves in groups for leaf in leaves for name in _stored_names(leaf, scheme)}
    others = (name for name in files.names - known if not name.endswith(OF_KV_CACHE))
    unknown = sorted(name for name in others if not is_ignored(name, config))
    if unknown:
        shown = ", ".join(unknown[:_MAX_SHOWN])
        raise InvalidArgument("weights", f"{len(unknown)} tensors are not part of {config.architecture}: {shown}")


def _select_groups(files: TensorSource, groups: Sequence[LeafGroup], scheme: Scheme | None) -> list[LeafGroup]:
    """Return the leaves of which there are tensors.

    Raises:
        InvalidArgument: there are some tensors of a leaf, but not all, or none of any leaf.
    """
    selected = []
    for path, leaves in groups:
        names = {name for leaf in leaves for name in _stored_names(leaf, scheme)}
        missing = sorted(names - files.names)
        if not missing:
            selected.append((path, leaves))
        elif len(missing) < len(names):
            given, shown = min(names & files.names), ", ".join(missing[:_MAX_SHOWN])
            problem = f"{len(missing)} tensors that are stored together with {given} are missing: {shown}"
            raise InvalidArgument(str(files.where(given)), problem)
    if not selected:
        raise InvalidArgument(str(files.where("")), "has no tensor of the model")
    return selected


def _check_types(files: TensorSource, leaves: Sequence[Leaf], scheme: Scheme | None) -> None:
    """Check the shapes of the tensors of some leaves, and the types of those that are not quantized."""
    for leaf in leaves:
        forms = stored_formats(None if scheme is None else scheme.quantization, leaf)
        for (name, shape), form in zip(leaf.tensors, forms, strict=True):
            if form is not None and scheme is not None:
                stored = shape[::-1] if is_input_first(leaf) else shape
                check_parts(files, scheme.parts(get_module(name), stored, form), stored)
                continue
            check_shape(files, name, shape)
            dtype = files.dtype(name)
            if leaf.dtype is not None and not jnp.issubdtype(leaf.dtype, jnp.floating):
                if dtype.kind != "i":
                    raise Unsupported(f"{files.where(name)}: tensor {name} is {dtype.name}; it must contain integers")
            elif dtype.name not in DTYPES:
                raise unsupported_dtype(files.where(name), name, dtype.name)


def _log_widening(folder: Path, scheme: Scheme | None, files: TensorSource, keeps_embedding: bool) -> None:
    """Log what matrices cost that take more memory than in the file."""
    if isinstance(files, BitsAndBytesTensors):
        _LOG.info(
            "%s: %d matrices of bitsandbytes become weights of the served type, because no kernel multiplies them as "
            "stored",
            folder,
            files.num_matrices,
        )
    cost = scheme.widening() if isinstance(scheme, CompressedTensors | Gptq | ModelOptNvfp4) else None
    if isinstance(scheme, GgufScheme):
        cost = read_model(folder, keeps_embedding=keeps_embedding).widening()
    if cost is not None:
        _LOG.info("%s: %s", folder, cost)


def _packed_leaf(
    pack_stored: PackStored,
    files: TensorSource,
    scheme: Scheme | None,
    path: LeafPath,
    leaf: Leaf,
    form: MatrixFormat,
    dtype: np.dtype,
) -> PackedMatrix | None:
    """Return a leaf packed from a GGUF file; None for other files, leaves and types."""
    if not (isinstance(files, GgufTensors) and isinstance(scheme, GgufScheme)) or leaf.axes[0] in EXPERT_AXES:
        return None
    matrix = abstract_matrix(form, leaf.shape, contracted_axis(leaf), dtype)
    columns = get_columns(files, scheme, leaf, form)
    return None if columns is None else pack_stored(path, matrix, columns)


def _read_matrix(
    files: TensorSource, scheme: Scheme | None, quantization: Quantization | None, dtype: np.dtype
) -> ReadMatrix:
    """Return a function that reads quantized matrices as published, or quantizes weights."""

    def read(name: str, shape: tuple[int, ...], axis: int) -> StoredMatrix:
        if scheme is None:
            form = None if quantization is None else quantization.get_format(get_module(name))
            assert form is not None
            return round_matrix(files, name, shape, axis, form, dtype)
        sizes = list(shape)
        sizes[1], sizes[axis] = sizes[axis], sizes[1]
        return read_matrix(scheme, files, get_module(name), tuple(sizes))

    return read


def _put_parts(parts: QuantizedMatrix, shardings: QuantizedMatrix | None) -> QuantizedMatrix:
    """Put the arrays of a quantized leaf on their devices."""
    leaves, tree = jax.tree.flatten(parts, is_leaf=lambda leaf: isinstance(leaf, LeafPart))
    placed = [None] * len(leaves) if shardings is None else jax.tree.leaves(shardings)
    arrays = [put(part.shape, part.read, sharding) for part, sharding in zip(leaves, placed, strict=True)]
    matrix: QuantizedMatrix = jax.tree.unflatten(tree, arrays)
    return matrix


def put(shape: tuple[int, ...], read: Read, sharding: Sharding | Format | None) -> jax.Array:
    """Copy a leaf to its devices, or to the default one, and wait, so that the host's copy can be freed."""

    def part(index: tuple[slice, ...] | None = None) -> np.ndarray:
        return read(index or (slice(None),) * len(shape))

    if sharding is None:
        return jax.block_until_ready(jax.device_put(part()))
    return jax.block_until_ready(jax.make_array_from_callback(shape, sharding, part))


@contextmanager
def open_tensors(folder: Path, *, keeps_embedding: bool = True) -> Iterator[TensorSource]:
    """Open the tensors of a checkpoint folder in any supported format.

    Args:
        keeps_embedding: see `read_model`.

    Raises:
        InvalidArgument: there are none, or they are broken, incomplete, or of an unknown version.
        Unsupported: they are only there in another format.
    """
    if is_gguf(folder):
        yield read_model(folder, keeps_embedding=keeps_embedding).tensors()
        return
    if is_orbax_folder(folder):
        yield OrbaxTensors(folder)
        return
    refuse_other_orbax(folder)
    with ExitStack() as opened:
        files = TensorFiles(folder, opened)
        widened = BitsAndBytesTensors(files)
        yield widened if widened.num_matrices else files


def read_head(folder: Path) -> EagleConfig:
    """Return the config of an EAGLE-3 head in a folder, from config.json and the tensor names.

    Raises:
        InvalidArgument: a file is missing or malformed.
        Unsupported: another kind of head, or an unsupported setting or format.
    """
    config = head_from_hf(read_json(folder / CONFIG_FILE))
    with open_tensors(folder) as tensors:
        return config.stored_as(tensors.names)


def read_mtp(folder: Path, model: ModelConfig) -> ModelConfig:
    """Return the config of the MTP layer in a model's checkpoint.

    Raises:
        InvalidArgument: the checkpoint has no tensors of an MTP layer.
        Unsupported: the model's family has no MTP layers, or they are not supported.
    """
    with open_tensors(folder) as tensors:
        config = stored_mtp(mtp_config(model), tensors.names)
        leaves = model_leaves(config, tensors.names)
        wanted = next(name for leaf in leaves.outer if leaf.path[0] == "eh_proj" for name, _ in leaf.tensors)
        if wanted not in tensors.names:
            raise InvalidArgument(
                "checkpoint", f"{folder} has no MTP layer: tensor {wanted} is missing; transformers does not save it"
            )
    return config


def check_tensors(tensors: TensorSource, config: ModelConfig, scheme: Scheme | None) -> None:
    """Raise the errors of `load_params` that need no weights, except for reading a duplicate of a tied embedding.

    Args:
        scheme: quantization scheme of the weights; None if they are not quantized.

    Raises:
        InvalidArgument: a tensor is missing, superfluous, misshapen or not tied as promised.
    """
    groups = _leaf_groups(config, tensors.names, "loop")
    _check_names(tensors, groups, config, scheme)
    for leaf in (leaf for _, leaves in groups for leaf in leaves):
        forms = stored_formats(None if scheme is None else scheme.quantization, leaf)
        for (name, shape), form in zip(leaf.tensors, forms, strict=True):
            if form is None or scheme is None:
                check_shape(tensors, name, shape)
            else:
                stored = shape[::-1] if is_input_first(leaf) else shape
                check_parts(tensors, scheme.parts(get_module(name), stored, form), stored)
    check_tie(tensors, config)


def _leaf_groups(config: ModelConfig, names: Collection[str], layer_mode: LayerMode) -> list[LeafGroup]:
    """Return the leaves by their paths in the tree; in scan mode a path in the layers has that leaf of each layer."""
    leaves = model_leaves(config, names)
    groups: list[LeafGroup] = [(leaf.path, [leaf]) for leaf in leaves.outer]
    if layer_mode == "scan":
        for name, stacked in get_stacks(config.layer_kinds).items():
            for leaf_of_each in zip(*(leaves.layers[index] for index in stacked), strict=True):
                groups.append((("layers", name, *leaf_of_each[0].path), leaf_of_each))
        return groups
    return groups + [(("layers", index, *leaf.path), [leaf]) for index, of in enumerate(leaves.layers) for leaf in of]


def _check_names(files: TensorSource, groups: Sequence[LeafGroup], config: ModelConfig, scheme: Scheme | None) -> None:
    leaves = [leaf for _, of_place in groups for leaf in of_place]
    wanted = {name for leaf in leaves for name in _stored_names(leaf, scheme)}
    left_over = sorted(
        name
        for name in files.names.difference(wanted)
        if not is_ignored(name, config) and not _is_unused(files, name, scheme)
    )
    if scheme is not None and not scheme.quantization.has_output:
        _refuse_output(files, left_over, get_module(find_family(config.architecture).lm_head), scheme)
    if not left_over:
        return
    # Superfluous tensors of matrices that are read could change the output; in GGUF only tensors name the parts.
    matrices = {get_module(name) for leaf in leaves for name, _ in leaf.tensors} if scheme is not None else set()
    refused = [name for name in left_over if name.rpartition(".")[0] in matrices or is_gguf(files.where(name))]
    shown = ", ".join(f"{name} ({files.where(name)})" for name in (refused or left_over)[:_MAX_SHOWN])
    text = f"{len(refused or left_over)} tensors are not part of {config.architecture} with this config: {shown}"
    if refused:
        raise InvalidArgument("checkpoint", text)
    _LOG.warning("checkpoint: %s; they are ignored", text)


def _refuse_output(files: TensorSource, left_over: Sequence[str], head: str, scheme: Scheme) -> None:
    name = next((name for name in left_over if name.startswith(f"{head}.") and not name.endswith(".bias")), None)
    if name is not None:
        raise Unsupported(
            f"{files.where(name)}: tensor {name}: {head} is quantized, but quant_method {scheme.quantization.method} "
            f"does not quantize it unless its config requires that; quantize the model again without {head}"
        )


def _stored_names(leaf: Leaf, scheme: Scheme | None) -> Iterator[str]:
    forms = stored_formats(None if scheme is None else scheme.quantization, leaf)
    for (name, shape), form in zip(leaf.tensors, forms, strict=True):
        if form is None or scheme is None:
            yield name
        else:
            yield from (part.name for part in scheme.parts(get_module(name), shape, form).values())


def _is_unused(files: TensorSource, name: str, scheme: Scheme | None) -> bool:
    """Return True if a tensor is of the KV cache, or without effect, like the zero biases of old quantizers."""
    if name.endswith(OF_KV_CACHE):
        return True
    return scheme is not None and name.endswith(".bias") and not files.read(name, files.shape(name)).any()


def _refuse_not_finite(files: TensorSource, leaves: Sequence[Leaf], dtype: np.dtype) -> None:
    for leaf in leaves:
        for name, shape in leaf.tensors:
            refuse_tensor(files, name, shape, dtype)
    raise InternalError(f"{leaves[0].path} is finite in the checkpoint, but not on a device")


@dataclass(frozen=True, slots=True)
class _LeafSource:
    """A leaf of the padded tree in the files: a single one, or that of all layers stacked."""

    files: TensorSource
    leaves: Sequence[Leaf]
    is_stacked: bool
    dtype: np.dtype
    split: PaddedAxis | None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.leaves[0].shape
        if self.split is not None:
            shape = self.split.padded_shape(shape)
        return (len(self.leaves), *shape) if self.is_stacked else shape

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Read a part of the leaf: a slice of the split axis and some of the layers; all other axes completely."""
        own = dataclasses.replace(self, leaves=self.leaves[index[0]]) if self.is_stacked else self
        if self.split is None:
            return own._pack(slice(None))
        begin, end, _ = index[self.split.axis + self.is_stacked].indices(self.split.wide_size)
        return self.split.padded(own._pack(slice(*self.split.source(begin, end))), begin, end)

    def read_rows(self) -> np.ndarray:
        """Return the whole leaf, with its first axis adjacent in memory."""
        (leaf,) = self.leaves
        rows = empty_array((*leaf.shape[1:], leaf.shape[0]), np.dtype(self.dtype))
        self._fill(leaf, np.moveaxis(rows, -1, 0), slice(None) if self.split is None else slice(0, self.split.size))
        return np.moveaxis(rows, -1, 0)

    def trace(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Return the whole leaf from its tensors, as traced arrays in the order of the leaves."""
        rest, built = iter(arrays), []
        for leaf in self.leaves:
            traced = _TracedLeaf(jnp.zeros(leaf.shape, self.dtype))
            leaf.pack([next(rest) for _ in leaf.tensors], traced)  # type: ignore[arg-type]
            value: Any = traced.value
            built.append(value if self.split is None else self.split.padded(value, 0, self.split.wide_size))
        # A copy, because a program returns an unchanged argument itself, which the caller may donate later.
        return jnp.array(jnp.stack(built) if self.is_stacked else built[0], copy=True)

    def _pack(self, part: slice) -> np.ndarray:
        """Read a part of the published leaf along the split axis, which need not be an axis of the stored tensors."""
        if self.split is not None and part != slice(0, self.split.size):
            axis = self.split.axis
            if any(leaf.tensor_axes[axis] is None for leaf in self.leaves):
                whole = self._pack(slice(0, self.split.size))
                return whole[(*(slice(None),) * (axis + self.is_stacked), part)]
        shape = list(self.leaves[0].shape)
        if self.split is not None:
            shape[self.split.axis] = part.stop - part.start
        stack = empty_array((len(self.leaves), *shape), np.dtype(self.dtype))
        for array, leaf in zip(stack, self.leaves, strict=True):
            self._fill(leaf, array, part)
        return stack if self.is_stacked else stack[0]

    def _fill(self, leaf: Leaf, array: np.ndarray, part: slice) -> None:
        """Read the tensors of a part of a leaf into an array."""
        read = read_weight if jnp.issubdtype(self.dtype, jnp.floating) else read_integers
        tensors = [read(self.files, name, stored, self._cut(leaf, stored, part)) for name, stored in leaf.tensors]
        with np.errstate(over="ignore"):  # float16: infinities are refused with the tensor's name
            leaf.pack(tensors, array)

    def _cut(self, leaf: Leaf, stored: tuple[int, ...], part: slice) -> tuple[slice, ...]:
        if self.split is None or part == slice(0, self.split.size):
            return ()
        axis = leaf.tensor_axes[self.split.axis]
        assert axis is not None  # `_pack` has read those completely
        begin, end = (place * stored[axis] // self.split.size for place in (part.start, part.stop))
        return (*(slice(None),) * axis, slice(begin, end))


def _find(params: Any, path: LeafPath) -> Any:
    for key in path:
        params = params[key]
    return params
