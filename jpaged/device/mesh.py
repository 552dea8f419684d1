"""Devices as a mesh, and the mesh axis of each logical axis of an array.

    stage    parts of the layers, in order (`Microbatches`): of their weights and of the pool
    context  parts of every context: the slots of a block (`jpaged.device.context`); each part has whole weights
    model    parts of one copy: heads, feed-forward width, vocabulary

Each copy of the model (replica) has its own mesh. Every array of the serving programs has a sharding that is made here.
An array that is not split over `model` is whole on every device, except the pool and layers in stages. All parts of the
pool have the same blocks, so one block table serves them all. If attention is data-parallel, each device of `model` has
other blocks, and the rows of their sequences (`TOKENS_SPEC`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.errors import InvalidArgument
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.matmul import PackedMatrix, QuantizedMatrix
from jpaged.kernels.matmul.triton.form import lies_by_columns
from jpaged.models.config import ModelConfig
from jpaged.models.layer_kinds import divides_into_stages
from jpaged.models.layers import Params
from jpaged.models.model import Model, can_stack
from jpaged.models.param_specs import LogicalAxes
from jpaged.models.sharding import logical_axes, pad_for_sharding
from jpaged.models.stack import LayerMode

if TYPE_CHECKING:
    from jaxtyping import Array, Int

_HALF_BYTES = (jnp.dtype(jnp.int4), jnp.dtype(jnp.float4_e2m1fn))
MODEL_AXIS = "model"
CONTEXT_AXIS = "context"
STAGE_AXIS = "stage"
MESH_AXES = (STAGE_AXIS, CONTEXT_AXIS, MODEL_AXIS)

LOGICAL_AXES: Mapping[str, str | None] = {
    "tokens": None,
    "rows": None,
    "blocks": None,
    "layer_blocks": STAGE_AXIS,
    "slots": CONTEXT_AXIS,
    "layers": STAGE_AXIS,
    "embed": None,
    "heads": MODEL_AXIS,
    "kv_heads": MODEL_AXIS,
    "feed_forward": MODEL_AXIS,
    "experts": None,
    "expert_parts": MODEL_AXIS,
    "vocab": MODEL_AXIS,
}
"""Mesh axis of each logical axis; None means whole on every device."""


def build_mesh(devices: Sequence[jax.Device], context_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> Mesh:
    """Build a mesh of one copy of the model. Devices of a topology description give a mesh to compile for.

    Devices that share heads, and so meet in most collectives, are neighbors. Stages, which exchange least, are farthest
    from each other.
    """
    return Mesh(np.asarray(devices).reshape(pipeline_parallel_size, context_parallel_size, -1), MESH_AXES)


def serving_mesh(tensor_parallel_size: int, context_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> Mesh:
    """Return a mesh of JAX's first devices; see `serving_meshes` for the devices of several processes.

    Raises:
        InvalidArgument: there are too few devices.
    """
    return serving_meshes(tensor_parallel_size, 1, context_parallel_size, pipeline_parallel_size)[0]


def serving_meshes(
    tensor_parallel_size: int,
    data_parallel_size: int,
    context_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
) -> list[Mesh]:
    """Return a mesh for each copy of the model: JAX's devices in order, each in at most one mesh.

    Several processes run one copy together, or with data_parallel_size equally many processes each copy; the mesh is
    that of this process's copy. Each process contributes the same number of devices; all its devices if
    tensor_parallel_size is 1. Heads are split over the devices of one process first, then contexts, then layers.

    Raises:
        InvalidArgument: there are too few devices, or the processes cannot share them evenly.
    """
    devices, size = jax.devices(), tensor_parallel_size
    if (num_processes := jax.process_count()) > 1:  # the other replicas have other processes
        num_processes //= data_parallel_size
        own, data_parallel_size = jax.process_index() // num_processes, 1
        devices = [device for device in devices if device.process_index // num_processes == own]
    if jax.process_count() > 1 and size == 1:
        size = max(1, len(devices) // (context_parallel_size * pipeline_parallel_size))
    of_stage, has = size * context_parallel_size, f"{devices[0].platform} has {len(devices)}"
    of_copy = of_stage * pipeline_parallel_size
    num_devices = of_copy * data_parallel_size
    if size > len(devices):
        raise InvalidArgument("tensor_parallel_size", f"requires {size} devices; {has}")
    if of_stage > len(devices):
        raise InvalidArgument(
            "context_parallel_size",
            f"{context_parallel_size} parts of {size} devices each (tensor_parallel_size) require {of_stage} devices; "
            f"{has}",
        )
    if of_copy > len(devices):
        raise InvalidArgument(
            "pipeline_parallel_size",
            f"{pipeline_parallel_size} stages of {of_stage} devices each require {of_copy} devices; {has}",
        )
    if num_processes > 1:
        each = _of_each_process(devices, of_copy, num_processes)
        _check_nesting(of_copy // num_processes, (size, context_parallel_size, pipeline_parallel_size))
        return [build_mesh(each, context_parallel_size, pipeline_parallel_size)]
    if num_devices > len(devices):
        raise InvalidArgument(
            "data_parallel_size",
            f"{data_parallel_size} copies of the model on {of_copy} devices each "
            f"(tensor_parallel_size{' times context_parallel_size' if context_parallel_size > 1 else ''}"
            f"{' times pipeline_parallel_size' if pipeline_parallel_size > 1 else ''}) require "
            f"{num_devices} devices; {has}",
        )
    firsts = range(0, num_devices, of_copy)
    return [
        build_mesh(devices[first : first + of_copy], context_parallel_size, pipeline_parallel_size) for first in firsts
    ]


def _of_each_process(devices: Sequence[jax.Device], size: int, num_processes: int) -> list[jax.Device]:
    first = devices[0].process_index
    groups = [[device for device in devices if device.process_index == first + i] for i in range(num_processes)]
    each, left_over = divmod(size, num_processes)
    if left_over or each > min(map(len, groups)):
        raise InvalidArgument(
            "tensor_parallel_size",
            f"{size} devices cannot be shared evenly by {num_processes} processes, which have "
            f"{', '.join(str(len(group)) for group in groups)}",
        )
    return [device for group in groups for device in group[:each]]


def _check_nesting(num_own: int, sizes: Sequence[int]) -> None:
    """Check that the parts of each process are a contiguous range on every axis, which its host blocks require.

    Args:
        num_own: devices of each process.
        sizes: of the axes, from the one whose devices are neighbors.

    Raises:
        InvalidArgument: they are not.
    """
    rest = num_own
    for size in sizes:
        if rest % size and size % rest:
            raise InvalidArgument(
                "tensor_parallel_size",
                f"{sizes[0]}: with {num_own} devices per process, each size of parallelism must be a divisor or a "
                "multiple of the devices of a process that are left for it",
            )
        rest = max(1, rest // size)


def num_shards(mesh: Mesh) -> int:
    """Return the number of parts that one copy of the model is split into."""
    return mesh.shape[MODEL_AXIS]


def get_dp_size(config: ModelConfig, mesh: Mesh) -> int:
    """Return the devices that each have the KV cache of some sequences; 1 if attention is not data-parallel."""
    return num_shards(mesh) if config.has_dp_attention else 1


def num_context_parts(mesh: Mesh) -> int:
    """Return the number of parts that every context is split into."""
    return mesh.shape[CONTEXT_AXIS]


def num_stages(mesh: Mesh) -> int:
    """Return the number of parts that the layers are split into."""
    return mesh.shape[STAGE_AXIS]


def first_device(mesh: Mesh) -> jax.Device:
    """Return one device as representative, since all are of one kind; among several processes, one of this process."""
    device: jax.Device = mesh.devices.flat[0]
    if jax.distributed.is_initialized():
        own = jax.process_index()
        return next((device for device in mesh.devices.flat if device.process_index == own), device)
    return device


def partition_spec(*logical_axes: str | None) -> PartitionSpec:
    """Return the spec of an array with these logical axes; None names an axis that is never split."""
    return PartitionSpec(*(None if axis is None else LOGICAL_AXES[axis] for axis in logical_axes))


TOKENS_SPEC = PartitionSpec(MODEL_AXIS)
"""Sharding of the tokens of data-parallel attention, and of its pool's blocks."""
POOL_SPEC = partition_spec("layer_blocks", "slots", "kv_heads")
CONTENTS_SPEC = partition_spec("blocks", "layers", "slots", "kv_heads")
"""Sharding of the result of `KVLayout.read_blocks`."""
SCALES_SPEC = partition_spec("layers", "kv_heads", None)
HEADS_SPEC = partition_spec("tokens", "heads", None)
SINKS_SPEC = partition_spec("heads")
PROJECTION_SPEC = partition_spec("tokens", "kv_heads", None, None)
LOGITS_SPEC = partition_spec("rows", "vocab")


def pool_spec(layout: KVLayout) -> PartitionSpec:
    """Return the sharding of the pool: by heads and slots, or by blocks for data-parallel attention."""
    return POOL_SPEC if layout.dp_size == 1 else TOKENS_SPEC


def contents_spec(layout: KVLayout) -> PartitionSpec:
    """Return the sharding of the result of `KVLayout.read_blocks`; whole for data-parallel attention."""
    return CONTENTS_SPEC if layout.dp_size == 1 else PartitionSpec()


def scales_spec(layout: KVLayout) -> PartitionSpec:
    """Return the sharding of the scales of an 8-bit pool."""
    return SCALES_SPEC if layout.dp_size == 1 else PartitionSpec()


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that is whole on every device of the mesh."""
    return NamedSharding(mesh, PartitionSpec())


def param_shardings(model: Model, layer_mode: LayerMode, mesh: Mesh) -> Params:
    """Return the sharding of every parameter, with a layout where TPUs or GPUs need one.

    The tree is that of `model.abstract_params(layer_mode)`.

    A TPU multiplies with a slice of stacked matrices in place if tiles consist of a row and a column of the matmul:
    [L, E, 2, F] must have E next to last in memory, or last if F is no multiple of 128. In the default layout, every
    step would first copy the slice (libtpu's own choice of layout: 224 MiB a layer of Llama-3-8B on a v6e, read,
    written and read again). All others stay row-major. libtpu would choose otherwise if columns are few or no multiple
    of 128, because it pads the last axis: every step would first copy an embedding 1600 wide.

    GPUs multiply 8-bit numbers by 8-bit rows if the numbers of a column are contiguous: cuBLAS accepts no other layout,
    and XLA would transpose the matrix in every step.
    """
    axes = logical_axes(model.config, layer_mode, model.dtype)
    shardings: Params = jax.tree.map(
        lambda names: NamedSharding(mesh, partition_spec(*names)), axes, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )
    platform = first_device(mesh).platform
    if platform == "gpu" and model.config.quantization is not None:
        turned: Params = jax.tree.map(_by_columns, model.abstract_params(layer_mode), shardings, is_leaf=_is_quantized)
        return turned
    if platform != "tpu":
        return shardings

    def laid_out(
        path: tuple[jax.tree_util.KeyEntry, ...], sharding: NamedSharding, axes: LogicalAxes, leaf: jax.ShapeDtypeStruct
    ) -> NamedSharding | Format:
        if not _is_matrix(path) or (_is_of_groups(path) and leaf.shape[-len(axes) + (axes[0] == "layers")] == 1):
            return sharding
        return Format(Layout(_order(axes, sharding.shard_shape(leaf.shape))), sharding)

    formats: Params = jax.tree_util.tree_map_with_path(laid_out, shardings, axes, model.abstract_params(layer_mode))
    return formats


def _order(axes: LogicalAxes, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of a device's part of a matrix, from the outermost in memory to the lanes."""
    own, last = 1 if axes[0] == "layers" else 0, len(axes) - 1
    if last == own + 1 or axes[own] in _EXPERTS:
        return tuple(range(len(axes)))
    ends = (own, last) if shape[last] % _LANES == 0 else (last, own)
    return (*range(own), *range(own + 1, last), *ends)


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedMatrix)


def _by_columns(leaf: Any, shardings: Any) -> Any:
    """Return the shardings of a leaf; column-major numbers get a format."""
    if not _is_quantized(leaf) or not lies_by_columns(_part(leaf, shardings)):
        return shardings
    place = leaf.ndim + leaf.axis
    order = (*(axis for axis in range(leaf.ndim) if axis != place), place)
    return dataclasses.replace(shardings, values=Format(Layout(order), shardings.values))


def _part(leaf: QuantizedMatrix, shardings: QuantizedMatrix) -> QuantizedMatrix:
    """Return a matrix with the shape of one device's part of the numbers."""
    shape = shardings.values.shard_shape(leaf.shape)
    return dataclasses.replace(leaf, values=jax.ShapeDtypeStruct(shape, leaf.values.dtype))


_LANES = 128
_EXPERTS = ("experts", "expert_parts")


def _is_of_groups(path: tuple[jax.tree_util.KeyEntry, ...]) -> bool:
    """Return True if the path names the scales or the zero points of a quantized matrix."""
    return path[-1] in (jax.tree_util.GetAttrKey("scales"), jax.tree_util.GetAttrKey("zeros"))


def _is_matrix(path: tuple[jax.tree_util.KeyEntry, ...]) -> bool:
    """Return True if the path names a kernel or an embedding, or an array of the same rank of a quantized one."""
    if path[-1] == jax.tree_util.GetAttrKey("values") or _is_of_groups(path):
        path = path[:-1]
    return path[-1] in (jax.tree_util.DictKey("kernel"), jax.tree_util.DictKey("embedding"))


@dataclass(frozen=True, slots=True)
class MeshPlacement:
    """A model's placement on a mesh.

    Attributes:
        mesh: the devices.
        model: padded for their number (`jpaged.models.sharding`).
        layer_mode: how the layers run, and so how the parameters are stacked.
        shardings: of the parameters, leaf by leaf, or formats, which have a layout too.
    """

    mesh: Mesh
    model: Model
    layer_mode: LayerMode
    shardings: Params

    @classmethod
    def of(cls, model: Model, mesh: Mesh, layer_mode: LayerMode | None = None) -> MeshPlacement:
        """Return the placement of a model as published; by default the layer mode suits the devices.

        Raises:
            InvalidArgument: the model cannot be split this way; names the numbers that work.
        """
        layer_mode = layer_mode or layer_mode_for(first_device(mesh))
        if num_stages(mesh) > 1:
            check_stages(model.config, num_stages(mesh))
            layer_mode = "scan"
        if not can_stack(model.config):
            layer_mode = "loop"
        wide = Model(pad_for_sharding(model.config, num_shards(mesh)), model.dtype)
        return cls(mesh, wide, layer_mode, param_shardings(wide, layer_mode, mesh))

    @property
    def num_parts(self) -> int:
        """Number of parts that one copy of the model is split into."""
        return num_shards(self.mesh)

    def put(self, params: Params) -> Params:
        """Return the parameters on these devices; those on other devices are copied from device to device.

        Packed matrices are returned unchanged.
        """

        def place(leaf: Any, shardings: Any) -> Any:
            return leaf if isinstance(leaf, PackedMatrix) else jax.device_put(leaf, shardings)

        has_packed = any(map(_is_packed, jax.tree.leaves(params, is_leaf=_is_packed)))
        placed: Params = (
            jax.tree.map(place, params, self.shardings, is_leaf=_is_packed)
            if has_packed
            else jax.device_put(params, self.shardings)
        )
        return placed

    def abstract_params(self) -> Params:
        """Return shapes, types and shardings of the parameters."""
        params: Params = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            self.model.abstract_params(self.layer_mode),
            self.shardings,
        )
        return params


def check_stages(config: ModelConfig, num_stages: int) -> None:
    """Check that the layers can be split into equal stages.

    Raises:
        InvalidArgument: they cannot; names the numbers that work.
    """
    if not can_stack(config):
        raise InvalidArgument(
            "pipeline_parallel_size", f"{num_stages}: layers with matrices of different formats are not stacked"
        )
    if not divides_into_stages(config.layer_kinds, num_stages):
        working = [n for n in range(1, config.num_layers + 1) if divides_into_stages(config.layer_kinds, n)]
        raise InvalidArgument(
            "pipeline_parallel_size",
            f"{num_stages} stages of equal layers cannot be made of {config.num_layers} layers of "
            f"{len(set(config.layer_kinds))} kinds; {', '.join(map(str, working))} work",
        )


def check_params(params: Params, expected: Params) -> None:
    """Check a parameter tree, some of whose matrices may be packed, against its description.

    Raises:
        InvalidArgument: names the first leaf that is missing, unknown, or of another shape or type.
    """
    got = _by_path(params, _is_packed)
    packed = {path for path, leaf in got.items() if isinstance(leaf, PackedMatrix)}
    want: dict[str, Any] = {}
    for path, leaf in _by_path(expected, lambda leaf: isinstance(leaf, QuantizedMatrix)).items():
        arrays = _by_path(leaf) if isinstance(leaf, QuantizedMatrix) and path not in packed else {"": leaf}
        want.update({path + end: array for end, array in arrays.items()})
    for path in sorted(got.keys() | want.keys()):
        if path not in got or path not in want:
            raise InvalidArgument(f"params{path}", "is missing" if path in want else "is not part of this model")
        if got[path].shape != want[path].shape or got[path].dtype != want[path].dtype:
            raise InvalidArgument(
                f"params{path}",
                f"is {got[path].dtype}{got[path].shape}; the model has {want[path].dtype}{want[path].shape}",
            )


def _by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, PackedMatrix)


def local_bytes(params: Params) -> int:
    """Return the bytes that one device holds of a tree of arrays; 4-bit numbers take half a byte, or one on CPUs."""
    return sum(_local_bytes(leaf) for leaf in jax.tree.leaves(params))


def _local_bytes(leaf: jax.Array) -> int:
    size = int(np.prod(leaf.sharding.shard_shape(leaf.shape)))
    device: jax.Device = next(iter(leaf.sharding.device_set))
    is_half = leaf.dtype in _HALF_BYTES and device.platform != "cpu"
    return -(-size // 2) if is_half else size * int(leaf.dtype.itemsize)


def on_shards(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return the function run by each device on its own shards; on one device the function itself.

    Within a stage (`on_stages`) the arrays are the stage's, and are split over the other axes only.
    """
    if mesh.size == 1:
        return function
    within = jax.sharding.get_abstract_mesh()
    # Kernels do not declare over which axes their results vary, so that cannot be checked.
    if STAGE_AXIS not in within.manual_axes:
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    own_in, own_out = _within_stage(in_specs), _within_stage(out_specs)
    axes = {CONTEXT_AXIS, MODEL_AXIS}
    return jax.shard_map(function, mesh=within, axis_names=axes, in_specs=own_in, out_specs=own_out, check_vma=False)


def _within_stage(specs: Any) -> Any:
    """Return specs of arrays without the axis of stages."""

    def without(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(*(None if axis == STAGE_AXIS else axis for axis in spec))

    return jax.tree.map(without, specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))


def on_stages(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return the function run by each stage on its part of the arrays; specs name the axis of stages only.

    XLA splits the computation of a stage over its devices.
    """
    return jax.shard_map(
        function, mesh=mesh, axis_names={STAGE_AXIS}, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def layer_mode_for(device: jax.Device) -> LayerMode:
    """Return the faster mode: `scan` on TPUs, compiled 5 times as fast; `loop` where a scan copies weights."""
    return "scan" if device.platform == "tpu" else "loop"


_MICROBATCHES_PER_STAGE = 4
"""Microbatches at most: with 4 per stage, a stage is idle in less than a fifth of the turns."""
_LEAST_TOKENS, _LEAST_TOKENS_ELSEWHERE = {"cpu": 8}, 256
"""Tokens of a microbatch at least: a turn with fewer takes as long, because it reads all weights of a stage."""


@dataclass(frozen=True, slots=True)
class Microbatches:
    """A step's packed tokens in equal parts, which pass through the stages one after another.

        turn       0    1    2    3
        stage 0    m0   m1   m2   -      each stage runs its layers on one microbatch, and
        stage 1    -    m0   m1   m2     passes the hidden states on to the next stage

    A row may be cut: a later part reads the keys that the earlier one stored, in each layer. Turns without a microbatch
    run on no rows.

    Attributes:
        num: number of microbatches.
        num_tokens: tokens of each, including padding.
    """

    num: int
    num_tokens: int

    @classmethod
    def of(cls, num_tokens: int, num_stages: int, platform: str) -> Microbatches:
        """Return the microbatches of a step of this many tokens."""
        least = _LEAST_TOKENS.get(platform, _LEAST_TOKENS_ELSEWHERE)
        nums = range(_MICROBATCHES_PER_STAGE * num_stages, 1, -1)
        num = next((num for num in nums if num_tokens % num == 0 and num_tokens >= least * num), 1)
        return cls(num, num_tokens // num)

    def take(
        self, inputs: Mapping[str, jax.Array], ids_t: Int[Array, "T"], index: Int[Array, ""]
    ) -> tuple[dict[str, jax.Array], Int[Array, "t"], Int[Array, ""]]:
        """Return the inputs and the tokens of a microbatch, and its number.

        If there is no microbatch with this index, it has no rows, stores nothing, and its number is `num`.
        """
        is_one = (index >= 0) & (index < self.num)
        begin = jnp.clip(index, 0, self.num - 1) * self.num_tokens
        end, starts_s1 = begin + self.num_tokens, inputs["query_starts_s1"]
        starts_s, ends_s, num_rows = starts_s1[:-1], starts_s1[1:], len(starts_s1) - 1
        is_used_s = jnp.arange(num_rows) < inputs["num_rows"]
        first = jnp.sum(is_used_s & (ends_s <= begin), dtype=jnp.int32)
        num_own = jnp.sum(is_used_s & (ends_s > begin) & (starts_s < end) & is_one, dtype=jnp.int32)
        rows_s = jnp.minimum(first + jnp.arange(num_rows), num_rows - 1)
        places_s1 = jnp.minimum(first + jnp.arange(num_rows + 1), num_rows)
        num_later_s = jnp.maximum(ends_s[rows_s] - end, 0)
        own_kv_s = inputs["kv_lens_s"][rows_s] - num_later_s

        def cut(array: jax.Array, axis: int = -1) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(array, begin, self.num_tokens, axis)

        names = ("positions_t", "rope_lens_t", "slots_gt", "adapters_t", "is_embed_t", "rope_shifts_3t")
        own = {name: cut(inputs[name]) for name in names if name in inputs}
        if "embeds_te" in inputs:
            own["embeds_te"] = cut(inputs["embeds_te"], 0)
        return (
            {
                **own,
                "slots_gt": jnp.where(is_one, own["slots_gt"], -1),
                "query_starts_s1": jnp.where(is_one, jnp.clip(starts_s1[places_s1] - begin, 0, self.num_tokens), 0),
                "kv_lens_s": jnp.where(jnp.arange(num_rows) < num_own, own_kv_s, 0),
                "block_tables_gsm": inputs["block_tables_gsm"][:, rows_s],
                "num_rows": num_own,
            },
            cut(ids_t),
            jnp.where(is_one, index, self.num),
        )
