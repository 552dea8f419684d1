"""The model of a plan, compiled for each target in a child process; jax sees only a CPU there.

The model is a name, a single config.json, or a folder; weights are not needed. A process per target isolates the
environment and crashes of the compiler: libtpu 0.0.42 has been seen to crash (signal 11, for tpu7x) while two programs
were compiled concurrently. If a signal ends a child, it is restarted with one program at a time.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from jpaged import errors, json_text
from jpaged.checkpoints.hub import choose_dtype, expand_home, find_local, override_config, read_config, read_json
from jpaged.checkpoints.quantized.quantizer import quantized_here
from jpaged.checkpoints.weights import read_head
from jpaged.config import EngineConfig, child_environment, tpu_library
from jpaged.config.speculative import NAME as SPECULATIVE
from jpaged.device.aot.deployment import Models, PlannedDeployment, compile_deployment
from jpaged.device.aot.topology import (
    compile_only_devices,
    compile_only_gpus,
    compiler_environment,
    find_library,
    find_topology,
)
from jpaged.device.compilation.aot_bundle import check_saved_platform
from jpaged.device.kv_scales import kv_dtype
from jpaged.device.linear import served_config
from jpaged.device.mesh import build_mesh
from jpaged.device.step_sizes import DeviceAttention
from jpaged.engine.executor import Progress
from jpaged.errors import InternalError, InvalidArgument, NotFound, Unsupported
from jpaged.models.config import ModelConfig
from jpaged.models.decoder.config import apply_lossy_window
from jpaged.models.eagle import is_mtp, mtp_config
from jpaged.models.hf_config import from_hf, to_hf
from jpaged.models.model import Model
from jpaged.models.sharding import largest_split, pad_for_sharding, with_dp_attention, with_parallel_experts
from jpaged.plan.known_models import KNOWN_MODELS, find_known
from jpaged.plan.step_times import PlannedModel, PlannedStepTimes, PlanTarget, find_target


def find_config(name: str, overrides: Mapping[str, Any] = MappingProxyType({})) -> tuple[str, ModelConfig]:
    """Return the model's name and config.

    Args:
        name: `demo`, a well-known model's name or hub id, a config.json or a folder that has one.
        overrides: values that replace those of config.json (`hf_overrides`).

    Raises:
        NotFound: no model has that name; the message lists the well-known ones.
        InvalidArgument, Unsupported: its config.json cannot be read or served.
    """
    folder = find_local(name)
    if folder is not None:
        return name, read_config(folder, overrides)
    path = expand_home(name, "model")
    if path.is_file():
        return name, from_hf(override_config(read_json(path), overrides))
    known = find_known(name)
    if known is not None and overrides:
        config = from_hf(override_config(to_hf(known.config), overrides))
        return known.name, dataclasses.replace(config, quantization=known.config.quantization)
    if known is None:
        raise NotFound(
            f"model: {name!r} is not a config.json, a folder or a built-in configuration; built in are "
            f"{', '.join(KNOWN_MODELS)}, by these names or their hub ids"
        )
    return known.name, known.config


_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Question:
    """Input of a plan: what to compile.

    Attributes:
        model: as `find_config` takes it.
        target: as `find_target` takes it.
        options: engine options, flat; tensor_parallel_size defaults to the maximum that the model allows.
        all_programs: compile every program, not only those that the plan needs.
        save: a folder to write the programs to, or None.
        num_threads: number of programs compiled concurrently; None for the default of a server.
    """

    model: str
    target: str
    options: Mapping[str, Any]
    all_programs: bool
    save: str | None = None
    num_threads: int | None = None


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """Plan of one target.

    Attributes:
        num_devices: devices that share one copy of the model.
        num_context_parts: context-parallel groups among them, each with a part of every context and the whole model.
        num_stages: pipeline stages among them, each with a part of the layers.
        dtype: type of weights and activations.
        kv_dtype: type of the pool.
        notes: choices that the user did not make explicitly.
        versions: versions of the compiling packages.
    """

    model: str
    target: PlanTarget
    num_devices: int
    num_context_parts: int
    num_stages: int
    dtype: str
    kv_dtype: str
    notes: tuple[str, ...]
    deployment: PlannedDeployment
    step_times: PlannedStepTimes
    versions: Mapping[str, str]

    @property
    def num_copies(self) -> int:
        """Copies of the model on all devices of the target. A copy takes num_devices; a remainder stays idle."""
        return self.target.num_devices // self.num_devices


def check_can_be_saved(target: str) -> None:
    """Check that programs for a target can be saved.

    Raises:
        InvalidArgument: they cannot, or there is no such target.
    """
    check_saved_platform("save", find_target(target).platform)


def _adjusted(config: ModelConfig, question: Question, options: EngineConfig) -> ModelConfig:
    """Return the config of a model with what the options change of it."""
    config = quantized_here(config, str(question.options.get("quantization", "auto")))
    config = with_parallel_experts(config) if options.parallel.enable_expert_parallel else config
    config = with_dp_attention(config) if options.parallel.enable_dp_attention else config
    return apply_lossy_window(config, options)


def answer(question: Question, progress: Progress) -> CompiledPlan:
    """Compile in this process.

    Raises:
        JpagedError: the model, an option or the target is invalid, or the compiler fails.
    """
    options = EngineConfig.load(question.options)
    name, config = find_config(question.model, options.model.overrides)
    target, config = find_target(question.target), _adjusted(config, question, options)
    draft = _draft_config(options, config)
    is_single = options.has_head and draft is not None and not is_mtp(draft)
    chosen = 1 if is_single else question.options.get("tensor_parallel_size")
    num_parts, in_stages = options.parallel.context_parallel_size, options.parallel.pipeline_parallel_size
    configs = [config] if draft is None else [config, draft]
    num_sharing, notes = _num_devices(configs, target, chosen, num_parts, in_stages)
    num_devices = num_sharing * num_parts * in_stages
    mesh = build_mesh(_devices(target)[:num_devices], num_parts, in_stages)
    config = served_config(config, options.model.linear_backend, mesh)
    draft = mtp_config(config) if draft is not None and is_mtp(draft) else draft
    dtype, reason = choose_dtype(options.model.dtype, config, target.platform)
    notes += [] if reason is None else [reason]
    model = Model(config, dtype)
    notes += DeviceAttention.on(model, options, mesh).reasons()
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
    held_dtype = kv_dtype(options.cache.kv_cache_dtype, model.dtype).name
    return CompiledPlan(
        model=name,
        target=target,
        num_devices=num_devices,
        num_context_parts=num_parts,
        num_stages=in_stages,
        dtype=model.dtype.name,
        kv_dtype=held_dtype,
        notes=(*notes, *_adapter_notes(options, deployment)),
        deployment=deployment,
        step_times=PlannedModel(
            config=config,
            kv_dtype=held_dtype,
            itemsize=model.dtype.itemsize,
            target=target,
            num_devices=num_sharing,
            num_context_parts=num_parts,
            num_stages=in_stages,
            weight_bytes=deployment.memory.request.weight_bytes,
            bytes_per_block=deployment.memory.request.bytes_per_block
            // (deployment.block_layers // in_stages)
            * config.num_layers,
            block_size=deployment.geometry.block_size // num_parts,
            number_bytes=deployment.number_bytes or model.dtype.itemsize,
            adapter_bytes=deployment.adapter_bytes,
            overlaps_sums=deployment.overlaps_sums,
            compiled_sums=deployment.sums,
            token_sizes=deployment.geometry.buckets.tokens,
        ).step_times(),
        versions={name: version(name) for name in ("jax", "jaxlib")},
    )


def _adapter_notes(options: EngineConfig, deployment: PlannedDeployment) -> list[str]:
    """Return a note about the cost of adapter slots, if there are any."""
    if not (num_slots := deployment.geometry.max_loras):
        return []
    return [
        f"{num_slots} adapter slots of rank {options.lora.max_lora_rank} take "
        f"{deployment.adapter_bytes / _GIB:.3f} GiB of the weights: every step reads all of them and multiplies "
        "every token with all of them"
    ]


def _num_devices(
    configs: Sequence[ModelConfig], target: PlanTarget, chosen: int | None, num_context_parts: int, num_stages: int
) -> tuple[int, list[str]]:
    """Return the number of tensor-parallel devices of a model and its draft, and notes about the choice."""
    most = target.num_devices // (num_context_parts * num_stages)
    if most < (chosen or 1):
        sizes = {"pipeline_parallel_size": num_stages, "context_parallel_size": num_context_parts}
        raise InvalidArgument(
            next((name for name, size in sizes.items() if size > 1), "tensor_parallel_size"),
            f"requires {(chosen or 1) * num_context_parts * num_stages} devices; {target.name} has "
            f"{target.num_devices}",
        )
    if chosen is not None:
        for config in configs:
            pad_for_sharding(config, chosen)
        return chosen, []
    largest = next(n for n in range(most, 0, -1) if all(largest_split(one, n) == n for one in configs))
    if largest == most:
        return largest, []
    heads = " and ".join(str(config.num_heads) for config in configs)
    return largest, [f"{heads} heads cannot be split over {most} devices: tensor_parallel_size is {largest}"]


def _devices(target: PlanTarget) -> Sequence[Any]:
    if target.platform == "tpu":
        return compile_only_devices(find_topology(target.name))
    return compile_only_gpus(target.num_devices, target.family)


def _draft_config(options: EngineConfig, model: ModelConfig) -> ModelConfig | None:
    """Return the config of the draft model or head, if the options have one."""
    if options.speculation is None or not options.has_draft:
        return None
    if options.speculation.model is None:
        try:
            return mtp_config(model)
        except Unsupported as error:
            raise Unsupported(f"{SPECULATIVE}.method: mtp: {error}") from error
    try:
        return _config_of_draft(options.speculation.model, is_head=options.has_head)
    except (InvalidArgument, NotFound) as error:
        raise InvalidArgument(f"{SPECULATIVE}.model", str(error).removeprefix("model: ")) from error


def _config_of_draft(name: str, *, is_head: bool) -> ModelConfig:
    if not is_head:
        return find_config(name)[1]
    folder = find_local(name)
    if folder is None:
        raise NotFound(f"model: {name!r} is not a folder with a draft head")
    return read_head(folder)


_GPU_ENVIRONMENT = {"JAX_PLATFORMS": "cpu"}


def compile_plan(question: Question, say: Callable[[str], None]) -> CompiledPlan:
    """Compile in a child and wait for the plan; retry if its compiler crashed.

    Args:
        question: what to compile.
        say: called with progress messages, one line each.

    Raises:
        JpagedError: the child reported an error, or died.
    """
    try:
        return _ask(question, say)
    except _Crashed as crash:
        say(f"the compiler crashed (signal {crash.number}): retrying with one program at a time")
    try:
        return _ask(dataclasses.replace(question, num_threads=1), say)
    except _Crashed as crash:
        raise InternalError(
            f"{question.target}: the compiler process crashed twice, by signal {crash.number}: {crash.last}"
        ) from crash


class _Crashed(Exception):
    """A signal ended the child."""

    def __init__(self, number: int, last: str) -> None:
        super().__init__(number, last)
        self.number, self.last = number, last


def _ask(question: Question, say: Callable[[str], None]) -> CompiledPlan:
    is_tpu = find_target(question.target).platform == "tpu"
    variables = compiler_environment(find_library(tpu_library())) if is_tpu else _GPU_ENVIRONMENT
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            [sys.executable, "-m", "jpaged.plan"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env=child_environment(variables),
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # the child has ended: its exit code gives the reason
                child.stdin.write(json_text.dumps(asdict(question)))
                child.stdin.close()
            found = _read(child.stdout, say)
        except BaseException:
            child.kill()
            raise
        code = child.wait()
        if found is None:
            said.seek(0)
            last = (said.read().strip().splitlines() or ["no output"])[-1]
            if code < 0:
                raise _Crashed(-code, last)
            raise InternalError(f"{question.target}: the compiler process exited with code {code}: {last}")
    return found


def _read(lines: IO[str], say: Callable[[str], None]) -> CompiledPlan | None:
    """Return the result from the output of a child; None if there is none."""
    found: CompiledPlan | None = None
    for line in lines:
        kind, _, rest = line.rstrip("\n").partition(" ")
        if kind == "progress":
            say(rest)
        elif kind == "error":
            name, *arguments = _decoded(rest)
            raise InvalidArgument(*arguments) if name == "InvalidArgument" else getattr(errors, name)(*arguments)
        elif kind == "result":
            found = _decoded(rest)
    return found


def _decoded(text: str) -> Any:
    """Decode a value that the child process wrote."""
    return pickle.loads(base64.b64decode(text))
