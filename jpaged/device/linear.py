"""Parameters as the programs of a step take them.

Matrices are packed on one CPU device, whose kernel multiplies with packed weights; XLA multiplies on others. If experts
are balanced, their arrays have the physical experts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jpaged.config import ActivationDtype, LinearBackend
from jpaged.device.expert_balance import add_replicas
from jpaged.device.mesh import first_device, layer_mode_for, num_context_parts, num_shards, num_stages, replicated
from jpaged.device.sharded_matmul import WIDER
from jpaged.device.step import Step
from jpaged.errors import Unsupported
from jpaged.kernels import matmul as matmul_module
from jpaged.kernels.matmul import (
    PackedMatrix,
    Packer,
    QuantizedMatrix,
    StoredColumns,
    can_pack,
    can_pack_experts,
    swap_experts,
)
from jpaged.models.config import ModelConfig
from jpaged.models.layers import Params
from jpaged.models.model import layer_formats, placed_leaves
from jpaged.models.param_specs import leaf_format
from jpaged.models.stack import LayerMode

_GATED = "gate_up"
_EXPERTS = "experts"
_EMBEDDING = ("embed", "embedding")


def choose_linear_backend(chosen: str, mesh: Mesh, layer_mode: LayerMode) -> LinearBackend:
    """Resolve the option `linear_backend` for a model on these devices.

    Raises:
        Unsupported: cpu was chosen but cannot run.
    """
    reason = None if chosen == "xla" else _unsupported_reason(mesh, layer_mode)
    if chosen == "cpu" and reason is not None:
        raise Unsupported(f"linear_backend: cpu cannot run here: {reason}")
    return "xla" if chosen == "xla" or reason is not None else "cpu"


def choose_activation_dtype(chosen: str, linear_backend: LinearBackend, config: ModelConfig) -> ActivationDtype:
    """Resolve the option `activation_dtype` for a model and its matmul backend.

    Raises:
        Unsupported: int8 was chosen but cannot run.
    """
    if chosen == "model":
        return "model"
    reason = None
    if linear_backend != "cpu":
        reason = "it requires linear_backend cpu, which runs on one CPU device"
    elif all(form.values == "fp8" or form.activations == "int8" for form in layer_formats(config)):
        reason = "the model has no quantized matrices whose rows it could round"
    if chosen == "int8" and reason is not None:
        raise Unsupported(f"activation_dtype: int8 cannot run here: {reason}")
    if chosen == "auto" and (reason is not None or not matmul_module.loaded().has_byte_products):
        return "model"
    return "int8"


def served_config(config: ModelConfig, chosen: str, mesh: Mesh) -> ModelConfig:
    """Return the config with the matrices that stay quantized on these devices: all, or all except the embedding.

    XLA multiplies directly with an embedding that has one scale per row. It would completely dequantize one that has
    several in every step, which only the kernel for CPUs avoids.

    Args:
        chosen: the option `linear_backend`.

    Raises:
        Unsupported: the chosen backend cannot run.
    """
    quantization = config.quantization
    if quantization is None or not quantization.has_embedding:
        return config
    leaves = (leaf for _, (leaf, *_) in placed_leaves(config, "loop") if leaf.path == _EMBEDDING)
    embedding = next(leaves, None)
    form = None if embedding is None else leaf_format(quantization, embedding)
    if form is None or form.group_size is None:
        return config
    if choose_linear_backend(chosen, mesh, layer_mode_for(first_device(mesh))) == "cpu":
        return config
    return dataclasses.replace(config, quantization=dataclasses.replace(quantization, has_embedding=False))


def params_for(step: Step, params: Params) -> Params:
    """Return the parameters, or their shapes, as a step's programs take them.

    See `pack_params`, `add_replicas` and `AdapterRoom`.
    """
    if step.linear_backend == "cpu":
        keeps_experts = step.slots is not None and step.slots.has_experts
        packer = _packer(step.mesh, step.activation_dtype)
        params = pack_params(params, step.model.config, packer, keeps_experts=keeps_experts)
    if first_device(step.mesh).platform == "cpu":
        params = whole_bytes(params)
    if step.abstract_expert_load() is not None:
        params = add_replicas(params, step)
    return params if step.slots is None else step.slots.add_to(params, step.model, step.layer_mode, step.mesh)


def leaf_for(step: Step, packer: LeafPacker | None, path: tuple[str | int, ...], leaf: Any, current: Any) -> Any:
    """Return one leaf as `params_for` returns all; `current` has its form, and no adapters."""
    if packer is not None and isinstance(current, PackedMatrix) and not isinstance(leaf, PackedMatrix):
        return packer.pack(tuple(name for name in path if isinstance(name, str)), leaf)
    if isinstance(leaf, np.ndarray):
        leaf = jax.device_put(np.ascontiguousarray(leaf), current.sharding)
    return whole_bytes({"leaf": leaf})["leaf"] if first_device(step.mesh).platform == "cpu" else leaf


def whole_bytes(params: Params) -> Params:
    """Return the tree with 4-bit numbers converted to 8-bit types, which represent all of them.

    On CPUs a 4-bit number takes a whole byte anyway, and JAX assumes different layouts for the arrays and for the
    programs compiled for them.
    """

    def widen(leaf: Any) -> Any:
        if not isinstance(leaf, matmul_module.QuantizedMatrix) or leaf.values.dtype not in WIDER:
            return leaf
        values, dtype = leaf.values, WIDER[leaf.values.dtype]
        if isinstance(values, jax.ShapeDtypeStruct):
            wide: Any = jax.ShapeDtypeStruct(values.shape, dtype, sharding=values.sharding)
        else:
            wide = values.astype(dtype)
        return dataclasses.replace(leaf, values=wide)

    widened: Params = jax.tree.map(widen, params, is_leaf=lambda leaf: isinstance(leaf, matmul_module.QuantizedMatrix))
    return widened


class LeafPacker:
    """Packs the leaves of a model for the kernel, by their paths.

    An embedding is packed if it is quantized or also the output matrix. Quantized matrices with group sizes that the
    kernel lacks are not packed, nor is any matrix of experts if it has one such; XLA multiplies with them.
    """

    def __init__(self, packer: Packer, config: ModelConfig) -> None:
        self._packer, self._fuses_gate = packer, config.fuses_gate
        self._output = _EMBEDDING if config.tie_word_embeddings else ("lm_head", "embedding")

    def pack(self, path: tuple[str, ...], leaf: Any) -> Any:
        """Return a leaf as the kernel reads it, or as it is; leaves may be shapes."""
        if path[-1] == "kernel" and _EXPERTS in path:
            return self._packer.pack(swap_experts(leaf), num_parts=leaf.shape[0])
        if isinstance(leaf, PackedMatrix) or (isinstance(leaf, QuantizedMatrix) and not can_pack(leaf)):
            return leaf
        if path == self._output or (path == _EMBEDDING and isinstance(leaf, QuantizedMatrix)):
            return self._packer.pack(leaf, is_embedding=True)
        return self._packer.pack(leaf, num_parts=self._num_parts(path)) if path[-1] == "kernel" else leaf

    def pack_stored(
        self, path: tuple[str | int, ...], matrix: QuantizedMatrix, columns: StoredColumns
    ) -> PackedMatrix | None:
        """Return `pack` of a matrix that is still in a file; None if it is not packed, or has another layout there."""
        names = tuple(name for name in path if isinstance(name, str))
        is_embedding = names in (self._output, _EMBEDDING)
        if not self._packs(names, matrix) or not (is_embedding or names[-1] == "kernel"):
            return None
        if not self._packer.can_pack_stored or matrix.group_ids is not None or matrix.input_scale is not None:
            return None
        return self._packer.pack_stored(matrix, columns, num_parts=1 if is_embedding else self._num_parts(names))

    def _packs(self, path: tuple[str, ...], matrix: QuantizedMatrix) -> bool:
        return _EXPERTS not in path and can_pack(matrix)

    def _num_parts(self, path: tuple[str, ...]) -> int:
        return 2 if path[-2] == _GATED and self._fuses_gate else 1


def packer_for(step: Step) -> LeafPacker | None:
    """Return the packer of a step's leaves; None if they are not packed."""
    if step.linear_backend != "cpu":
        return None
    return leaf_packer(step.model.config, step.mesh, step.activation_dtype)


def leaf_packer(config: ModelConfig, mesh: Mesh, activation_dtype: ActivationDtype) -> LeafPacker:
    """Return the packer of a model's leaves for one CPU device."""
    return LeafPacker(_packer(mesh, activation_dtype), config)


def _packer(mesh: Mesh, activation_dtype: ActivationDtype) -> Packer:
    return matmul_module.loaded().packer(replicated(mesh), rounds_rows=activation_dtype == "int8")


def pack_params(params: Params, config: ModelConfig, packer: Packer, *, keeps_experts: bool = False) -> Params:
    """Return the tree, with layers in a list, with its matrices packed as by `LeafPacker`; its leaves may be shapes.

    The input tree is taken apart: each leaf is freed when it is packed, so that a model is never in memory twice.

    Args:
        keeps_experts: experts are not packed, because they have adapters.
    """
    pack = LeafPacker(packer, config).pack

    def walk(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        packed: dict[str, Any] = {}
        for name in sorted(tree):  # JAX's flattening order, the same in every process
            leaf = tree.pop(name)
            if name == _EXPERTS and (
                keeps_experts or not all(can_pack_experts(linear["kernel"]) for linear in leaf.values())
            ):
                packed[name] = leaf
            elif isinstance(leaf, dict):
                packed[name] = walk(leaf, (*path, name))
            elif isinstance(leaf, list):
                packed[name] = [walk(layer, (*path, name)) for layer in leaf]
            else:
                packed[name] = pack((*path, name), leaf)
            del leaf
        return packed

    return walk(params, ())


def _unsupported_reason(mesh: Mesh, layer_mode: LayerMode) -> str | None:
    platform = first_device(mesh).platform
    if platform != "cpu":
        return f"it runs on CPUs, not on {platform}"
    if num_shards(mesh) > 1:
        return f"the model is split over {num_shards(mesh)} devices (tensor_parallel_size)"
    if num_stages(mesh) > 1:
        return f"the layers are split into {num_stages(mesh)} stages (pipeline_parallel_size)"
    if mesh.size > 1:
        return f"contexts are split over {num_context_parts(mesh)} devices (context_parallel_size)"
    if layer_mode == "scan":
        return "weights of scanned layers are stacked"
    found = matmul_module.kernel()
    return found if isinstance(found, str) else None
