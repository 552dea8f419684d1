"""A model compiled for one target, in a process of its own (`process`): a CPU's for all that jax knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.capacity.named_model import find_config
from jpaged.capacity.step_times import PlannedModel, StepTimes
from jpaged.capacity.target import Target, find_target
from jpaged.checkpoints.hub import find_local
from jpaged.checkpoints.quantised.rounding import quantised_here
from jpaged.checkpoints.weights import read_head
from jpaged.config import EngineConfig
from jpaged.config.speculative import NAME as SPECULATIVE
from jpaged.device.aot.deployment import Deployment, Models, compile_deployment
from jpaged.device.aot.gpu import compile_only_gpus
from jpaged.device.aot.tpu import compile_only_devices, find_topology
from jpaged.device.kv_scales import kv_dtype
from jpaged.device.mesh import build_mesh
from jpaged.device.step_sizes import Attention
from jpaged.engine.executor import Progress
from jpaged.errors import InvalidArgument, NotFound
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import lossy
from jpaged.models.model import Model
from jpaged.models.sharding import largest_split, pad_for_sharding, with_parallel_experts

_SERVED = ("float32", "bfloat16")
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Question:
    """What to compile.

    Attributes:
        model: as `find_config` takes it.
        target: as `find_target` takes it.
        options: of the engine, flat; a tensor_parallel_size that is left out is as large as the model allows.
        all_programs: compile every program, not only those that the plan needs.
        save: a folder to write them to; None saves none.
        num_threads: programs that are compiled at a time; None is as a server does.
    """

    model: str
    target: str
    options: Mapping[str, Any]
    all_programs: bool
    save: str | None = None
    num_threads: int | None = None


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """What was found for one target.

    Attributes:
        num_devices: that share one copy of the model.
        num_context_parts: of them, those that each have a part of every context and the same of the model.
        dtype: of weights and activations.
        kv_dtype: of the pool.
        notes: what was decided that was not asked for.
        versions: of what compiled.
    """

    model: str
    target: Target
    num_devices: int
    num_context_parts: int
    dtype: str
    kv_dtype: str
    notes: tuple[str, ...]
    deployment: Deployment
    step_times: StepTimes
    versions: Mapping[str, str]

    @property
    def num_copies(self) -> int:
        """The copies of the model on all devices of the target: a copy takes num_devices, and the rest is idle."""
        return self.target.num_devices // self.num_devices


def answer(question: Question, progress: Progress) -> CompiledPlan:
    """Compiles, in this process.

    Raises:
        JpagedError: the model, an option or the target cannot be, or the compiler fails.
    """
    name, config = find_config(question.model)
    config = quantised_here(config, str(question.options.get("quantization", "auto")))
    target = find_target(question.target)
    options = EngineConfig.load(question.options)
    if options.parallel.enable_expert_parallel:
        config = with_parallel_experts(config)
    config = lossy.as_asked(config, options)
    draft, chosen = _draft_config(options), 1 if options.has_head else question.options.get("tensor_parallel_size")
    num_parts = options.parallel.context_parallel_size
    num_sharing, notes = _num_devices([config] if draft is None else [config, draft], target, chosen, num_parts)
    num_devices = num_sharing * num_parts
    dtype = options.model.dtype
    if dtype == "auto":
        dtype = config.checkpoint_dtype if config.checkpoint_dtype in _SERVED else "bfloat16"
        if config.checkpoint_dtype not in (None, dtype):
            notes.append(f"the checkpoint is {config.checkpoint_dtype}: planned as with --dtype {dtype}")
    model = Model(config, np.dtype(dtype))
    mesh = build_mesh(_devices(target)[:num_devices], num_parts)
    notes += Attention.on(model, options, mesh).reasons()
    deployment = compile_deployment(
        Models(model, None if draft is None else Model(draft, model.dtype)),
        options,
        mesh,
        target.hardware.usable_bytes,
        all_programs=question.all_programs,
        progress=progress,
        save=None if question.save is None else Path(question.save),
        num_threads=question.num_threads,
    )
    if num_slots := deployment.geometry.max_loras:
        notes.append(
            f"{num_slots} adapter slots of rank {options.lora.max_lora_rank} are {deployment.adapter_bytes / _GIB:.3f} "
            "GiB of the weights: every step reads them, and every token is multiplied with all"
        )
    return CompiledPlan(
        model=name,
        target=target,
        num_devices=num_devices,
        num_context_parts=num_parts,
        dtype=dtype,
        kv_dtype=kv_dtype(options.cache.kv_cache_dtype, model.dtype).name,
        notes=tuple(notes),
        deployment=deployment,
        step_times=PlannedModel(
            config=config,
            kv_dtype=kv_dtype(options.cache.kv_cache_dtype, model.dtype).name,
            itemsize=model.dtype.itemsize,
            target=target,
            num_devices=num_sharing,
            num_context_parts=num_parts,
            weight_bytes=deployment.memory.request.weight_bytes,
            bytes_per_block=deployment.memory.request.bytes_per_block // deployment.block_layers * config.num_layers,
            block_size=deployment.geometry.block_size // num_parts,
            number_bytes=deployment.number_bytes or model.dtype.itemsize,
            adapter_bytes=deployment.adapter_bytes,
        ).step_times(),
        versions={name: version(name) for name in ("jax", "jaxlib")},
    )


def _num_devices(
    configs: Sequence[ModelConfig], target: Target, chosen: int | None, num_context_parts: int
) -> tuple[int, list[str]]:
    """Devices that share the heads of a model, over which its draft is split too, and what there is to say of it."""
    most = target.num_devices // num_context_parts
    if most < (chosen or 1):
        raise InvalidArgument(
            "tensor_parallel_size" if num_context_parts == 1 else "context_parallel_size",
            f"{(chosen or 1) * num_context_parts} devices are asked for; {target.name} has {target.num_devices}",
        )
    if chosen is not None:
        for config in configs:
            pad_for_sharding(config, chosen)
        return chosen, []
    largest = next(n for n in range(most, 0, -1) if all(largest_split(one, n) == n for one in configs))
    if largest == most:
        return largest, []
    heads = " and ".join(str(config.num_heads) for config in configs)
    return largest, [f"{heads} heads are not split over {most} devices: tensor_parallel_size is {largest}"]


def _devices(target: Target) -> Sequence[Any]:
    if target.platform == "tpu":
        return compile_only_devices(find_topology(target.name))
    return compile_only_gpus(target.num_devices, target.family)


def _draft_config(options: EngineConfig) -> ModelConfig | None:
    """The config of the model that proposes tokens, where the options ask for one."""
    if options.speculation is None or options.speculation.model is None:
        return None
    try:
        return _config_of_draft(options.speculation.model, is_head=options.has_head)
    except (InvalidArgument, NotFound) as error:
        raise InvalidArgument(f"{SPECULATIVE}.model", str(error).removeprefix("model: ")) from error


def _config_of_draft(name: str, *, is_head: bool) -> ModelConfig:
    if not is_head:
        return find_config(name)[1]
    folder = find_local(name)
    if folder is None:
        raise NotFound(f"model: {name!r} is no folder with a head")
    return read_head(folder)
