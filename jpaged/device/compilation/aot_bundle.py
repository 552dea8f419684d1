"""Compiled programs in a folder, made on any machine that can compile for the device, loaded on the device's machine.

    folder/
      programs.json          the target of the programs, field by field, and the list of them
      forward-512.program   one executable: bytes of the device's compiler, with the trees of the arguments

A program runs only on the exact target that it was compiled for: every field of `CompileTarget` must match the
server's; an error names the one that does not. The files are pickles: load only folders that you trust as you trust
code.

GPUs are not supported. XLA chooses the tiles of GPU kernels by timing them on the device, so programs that were
compiled without it would keep untuned tiles. The compiler also reports another platform version than a client does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

from jpaged import json_text
from jpaged.device.compilation.compile import ProgramSpec, compiler_options
from jpaged.device.compilation.program_registry import CompiledProgram
from jpaged.device.kv_scales import name_of_kv_dtype
from jpaged.device.mesh import first_device, num_context_parts, num_shards, num_stages
from jpaged.device.step import DraftStep, Step
from jpaged.engine.executor import Geometry
from jpaged.errors import InternalError, InvalidArgument
from jpaged.models.config import ModelConfig
from jpaged.models.model import dense_formats
from jpaged.version import __version__

MANIFEST = "programs.json"
FORMAT = 2
_SOURCES = ("device/**/*.py", "kernels/**/*.py", "kernels/**/*.json", "models/**/*.py", "engine/executor/*.py")


def check_saved_platform(option: str, platform: str) -> None:
    """Check that programs of a platform can be saved and loaded.

    Raises:
        InvalidArgument: they cannot; names the option.
    """
    if platform in ("gpu", "cuda"):
        raise InvalidArgument(
            option,
            "saved programs are not supported for GPUs, whose compiler times kernels on the device: `jpaged serve` "
            "compiles at its first start there, and stores the programs for the next starts (JPAGED_CACHE_DIR)",
        )


@dataclass(frozen=True, slots=True)
class CompileTarget:
    """Everything that programs are compiled for. Fields that are options have the options' names.

    Attributes:
        sources: digest of the code that programs are traced from.
        platform_version: of the device's compiler and runtime.
        model: digest of the model's configuration.
        compiler_options: additional options of the compiler.
        layers: how layers run, see `jpaged.models.stack`.
        cascade: digest of the costs of cascade attention; empty if it is off.
        max_loras: adapter slots; 0 is none.
        enable_prompt_embeds: forwards take input embeddings.
        speculation: digest of the draft model and how it runs; empty if there is none.
    """

    jpaged: str
    sources: str
    jax: str
    jaxlib: str
    platform: str
    platform_version: str
    device_kind: str
    model: str
    dtype: str
    tensor_parallel_size: int
    context_parallel_size: int
    pipeline_parallel_size: int
    attention_backend: str
    linear_backend: str
    activation_dtype: str
    kv_cache_dtype: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    layers: str
    cascade: str
    max_loras: int
    max_lora_rank: int
    enable_dora: bool
    enable_lm_head_lora: bool
    enable_embedding_lora: bool
    enable_expert_lora: bool
    enable_prompt_embeds: bool
    speculation: str
    compiler_options: str

    @classmethod
    def of(cls, step: Step, geometry: Geometry) -> CompileTarget:
        """Return the target of the programs of a step; the mesh may consist of a topology's devices."""
        device, model = first_device(step.mesh), step.model
        return cls(
            jpaged=__version__,
            sources=digest_of_sources(),
            jax=jax.__version__,
            jaxlib=jaxlib.version.__version__,
            platform=device.platform,
            platform_version=device.client.platform_version,
            device_kind=device.device_kind,
            model=_digest_of_model(model.config),
            dtype=model.dtype.name,
            tensor_parallel_size=num_shards(step.mesh),
            context_parallel_size=num_context_parts(step.mesh),
            pipeline_parallel_size=num_stages(step.mesh),
            attention_backend=step.backend,
            linear_backend=step.linear_backend,
            activation_dtype=step.activation_dtype,
            kv_cache_dtype=name_of_kv_dtype(step.layout.dtype),
            block_size=geometry.block_size,
            num_blocks=geometry.num_blocks,
            max_model_len=geometry.max_model_len,
            max_num_seqs=geometry.max_num_seqs,
            max_num_batched_tokens=geometry.max_num_batched_tokens,
            layers=step.layer_mode,
            cascade=_digest(repr(geometry.cascade)) if geometry.cascade else "",
            max_loras=geometry.max_loras,
            max_lora_rank=step.slots.max_rank if step.slots else 0,
            enable_dora=step.slots is not None and step.slots.has_vectors,
            enable_lm_head_lora=step.slots is not None and step.slots.has_output,
            enable_embedding_lora=step.slots is not None and step.slots.has_input,
            enable_expert_lora=step.slots is not None and step.slots.has_experts,
            enable_prompt_embeds=geometry.embed_width > 0,
            speculation=_digest_of_draft(step.draft) if step.draft else "",
            compiler_options=json_text.dumps(
                compiler_options(device, dense_formats(model.config), overlaps_sums=step.overlaps_sums), sort_keys=True
            ),
        )


@dataclass(frozen=True, slots=True)
class AOTBundle:
    """An opened folder of programs; `load` reads one of them.

    Attributes:
        folder: its path.
        target: the target that they were compiled for.
        names: file of each program.
    """

    folder: Path
    target: CompileTarget
    names: Mapping[str, str]

    @classmethod
    def open(cls, folder: Path) -> AOTBundle:
        """Read the folder's manifest.

        Raises:
            InvalidArgument: it is no folder of programs, or of another format.
        """
        try:
            manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidArgument("compiled", f"{folder} has no saved programs: {error}") from error
        if manifest.get("format") != FORMAT:
            raise InvalidArgument("compiled", f"{folder} has format {manifest.get('format')}; supported: {FORMAT}")
        try:
            return cls(folder, CompileTarget(**manifest["target"]), manifest["programs"])
        except (KeyError, TypeError) as error:
            raise InvalidArgument("compiled", f"{folder / MANIFEST} is damaged: {error}") from error

    def check(self, target: CompileTarget) -> None:
        """Check that the programs match this server's target.

        Raises:
            InvalidArgument: the server's devices are GPUs, or a field differs; names it, with both values and advice.
        """
        check_saved_platform("compiled", target.platform)
        for field in dataclasses.fields(CompileTarget):
            saved, here = getattr(self.target, field.name), getattr(target, field.name)
            if saved != here:
                raise InvalidArgument(
                    "compiled",
                    f"the programs in {self.folder} are for {field.name} {saved!r}, but this server has {here!r}: "
                    "make them equal, or save programs for this server with `jpaged plan --save`",
                )

    def has(self, spec: ProgramSpec) -> bool:
        """Return True if the program was saved."""
        return str(spec) in self.names

    def load(self, spec: ProgramSpec, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
        """Load one program onto its devices.

        Raises:
            InvalidArgument: its file is missing or damaged.
        """
        path = self.folder / self.names[str(spec)]
        try:
            executable, in_tree, out_tree = pickle.loads(path.read_bytes())
            return serialize_executable.deserialize_and_load(
                executable, in_tree, out_tree, backend=devices[0].client, execution_devices=list(devices)
            )
        except (OSError, pickle.UnpicklingError, ValueError, EOFError, KeyError, jax.errors.JaxRuntimeError) as error:
            raise InvalidArgument("compiled", f"{path} cannot be loaded as {spec}: {error}") from error


def save_programs(folder: Path, target: CompileTarget, programs: Mapping[ProgramSpec, CompiledProgram]) -> int:
    """Write programs to a folder, which is created; the manifest comes last, so that an incomplete folder is invalid.

    Returns:
        bytes of all programs.

    Raises:
        InvalidArgument: the folder is not empty, or cannot be written; or the programs are for GPUs.
        InternalError: a program was loaded, not compiled: on CPUs it would lack functions when it is loaded again.
    """
    check_saved_platform("save", target.platform)
    loaded = [str(spec) for spec, program in programs.items() if program.origin != "compiled"]
    if loaded:
        raise InternalError(f"programs that were loaded instead of compiled cannot be saved: {', '.join(loaded)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InvalidArgument("save", f"{folder} is not empty")
        names, num_bytes = {}, 0
        for spec, program in programs.items():
            name = f"{'-'.join((spec.kind, str(spec.size), *spec.variant))}.program"
            content = pickle.dumps(serialize_executable.serialize(program.executable))
            (folder / name).write_bytes(content)
            names[str(spec)] = name
            num_bytes += len(content)
        manifest = {"format": FORMAT, "target": dataclasses.asdict(target), "programs": names}
        (folder / MANIFEST).write_text(json_text.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidArgument("save", f"{folder} cannot be written: {error}") from error
    return num_bytes


def digest_of_sources() -> str:
    """Return the digest of the code that programs are traced from."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _SOURCES for path in root.glob(pattern)):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _digest_of_model(config: ModelConfig) -> str:
    """Return the digest of the configuration, without fields that programs do not depend on."""
    return _digest(repr(dataclasses.replace(config, eos_token_ids=(), bos_token_id=None, checkpoint_dtype=None)))


def _digest_of_draft(draft: DraftStep) -> str:
    step = draft.step
    how = (step.model.dtype, step.layout, step.layer_mode, step.backend, step.linear_backend, step.activation_dtype)
    beside = draft.group, draft.num_tokens, draft.watched, draft.shared, draft.pinned_length
    return _digest(repr((_digest_of_model(step.model.config), how, *beside)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
