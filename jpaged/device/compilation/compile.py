"""The list of programs, the compile cache on disk, and a counter of programs that are compiled too late."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from jax import monitoring
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding

from jpaged.device.sampling import SamplingStages
from jpaged.engine.executor import MIN_BUCKET, BucketTable, Detail
from jpaged.engine.executor.aux_io import AuxKind
from jpaged.hardware import identify_hardware
from jpaged.kernels.matrix_format import MatrixFormat

_LOG = logging.getLogger(__name__)
_COMPILED = "/jax/core/compile/backend_compile_duration"
_FROM_CACHE = "/jax/compilation_cache/cache_hits"

StepKind = Literal["forward", "sample", "decode", "edited", "count", "tell", "load_adapter"]
MoveKind = Literal["copy", "swap_out", "swap_in"]
DraftKind = Literal["speculate", "draft", "draft_copy"]
ExpertsKind = Literal["expert_load", "exchange_experts"]
ImageKind = Literal["encode"]


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """One program: `forward` for T tokens, `sample` for R rows with a level of log-probabilities, `decode`, or a move.

    `decode` is several steps of R rows, without log-probabilities. `edited` is a sample of R rows with logits
    processors; the level of log-probabilities is an argument. `count` counts up to `size` tokens for it. Auxiliary
    outputs (see `jpaged.engine.executor.io`) have programs for `size` positions. `load_adapter` fills one adapter
    slot. If there is a draft model, `speculate` is rounds of R rows, `draft` runs the draft over the tokens of a
    forward, and `draft_copy` copies blocks in its pool. If experts are balanced, `expert_load` reads and resets their
    load, and `exchange_experts` moves the experts of a layer, one program for each kind of array. `encode` is the
    vision encoder for up to `size` patches; it runs on one device.

    On devices whose programs have no branches, samples of some stages only are separate programs, the level of
    log-probabilities of `edited` is fixed, and there is no `decode`.
    """

    kind: (
        Literal["forward", "sample", "decode", "edited", "count", "tell", "load_adapter"]
        | DraftKind
        | MoveKind
        | ExpertsKind
        | ImageKind
    )
    size: int
    detail: Detail = Detail.TOKENS
    tell: AuxKind = AuxKind.LOGPROBS
    stages: SamplingStages = SamplingStages.ALL

    def __str__(self) -> str:
        return f"{self.kind}[{', '.join((str(self.size), *self.variant))}]"

    @property
    def variant(self) -> tuple[str, ...]:
        """Words that distinguish it from other programs of the same kind and size, if there are any."""
        if self.kind == "tell":
            return (self.tell.name.lower().replace("_", "-"),)
        return (*_STAGES[self.stages], *_VARIANTS[self.detail])

    @property
    def stand_ins(self) -> tuple[ProgramSpec, ...]:
        """Programs that compute what it does and more, the least of them first."""
        more = itertools.product(range(self.detail, len(Detail)), range(self.stages, len(SamplingStages)))
        return tuple(
            dataclasses.replace(self, detail=Detail(detail), stages=SamplingStages(stages)) for detail, stages in more
        )[1:]


LOAD_ADAPTER = ProgramSpec("load_adapter", 1)
EXPERT_LOAD = ProgramSpec("expert_load", 1)
TELLS = {tell: ProgramSpec("tell", size, tell=tell) for tell, size in zip(AuxKind, (64, MIN_BUCKET, 64), strict=True)}
"""The `compute_aux` programs; that of all log-probabilities has few rows, each as wide as the vocabulary."""
COUNT = ProgramSpec("count", 256)
"""A longer sequence is counted in parts."""
_EDITED_EVERY = 2
"""How many sizes share an `edited` program: it compiles five times as long as a sample, and its rows are fewer."""
_VARIANTS: Mapping[Detail, tuple[str, ...]] = {
    Detail.TOKENS: (),
    Detail.LOGPROBS: ("logprobs",),
    Detail.TOP_LOGPROBS: ("top",),
}
_STAGES: Mapping[SamplingStages, tuple[str, ...]] = {
    SamplingStages.GREEDY: ("greedy",),
    SamplingStages.RANDOM: ("random",),
    SamplingStages.ALL: (),
}


def program_specs(
    buckets: BucketTable,
    move_sizes: Sequence[int],
    *,
    has_host_blocks: bool,
    has_adapters: bool = False,
    has_branches: bool = True,
    num_expert_arrays: int = 0,
    is_encoder: bool = False,
    image_sizes: Sequence[int] = (),
) -> list[ProgramSpec]:
    """Return every program that serves, most needed first; the list begins with `least_programs`.

    Args:
        has_branches: as of `Step`.
        num_expert_arrays: kinds of arrays of experts that are balanced; 0 if none are.
        is_encoder: the model generates nothing, so that samples only report whether hidden states are finite.
        image_sizes: numbers of patches of a vision encoder's programs.
    """
    least = least_programs(
        buckets,
        move_sizes,
        has_host_blocks=has_host_blocks,
        has_adapters=has_adapters,
        has_branches=has_branches,
        num_expert_arrays=num_expert_arrays,
        is_encoder=is_encoder,
    )
    tokens, rows = list(buckets.tokens), list(buckets.rows)
    if is_encoder:
        samples = [ProgramSpec("sample", size, Detail.TOP_LOGPROBS) for size in rows]
        moves = [ProgramSpec("copy", size) for size in move_sizes]
        return list(dict.fromkeys((*least, *_forwards(tokens[::-1], has_draft=False), *samples, *moves)))
    has_draft = bool(buckets.speculates)
    decodes = _forwards((tokens[0], buckets.num_tokens(min(rows[-1], tokens[-1]))), has_draft=has_draft)
    forwards = _forwards(tokens[::-1], has_draft=has_draft)
    details = (Detail.TOP_LOGPROBS, Detail.TOKENS, Detail.LOGPROBS)
    samples = [ProgramSpec("sample", size, detail) for detail in details for size in rows]
    edited = [ProgramSpec("edited", size) for size in rows[::-1][::_EDITED_EVERY]]
    if not has_branches:
        # Rows with log-probabilities run all stages: few requests have them, and the additional passes cost little.
        greedy, random = SamplingStages.GREEDY, SamplingStages.RANDOM
        samples = [*(ProgramSpec("sample", size, stages=one) for one in (greedy, random) for size in rows), *samples]
        edited = [
            variant
            for spec in edited
            for variant in (_with_logprobs(spec), spec, dataclasses.replace(spec, stages=random))
        ]
    moves = [ProgramSpec(kind, size) for size in move_sizes for kind in _move_kinds(has_host_blocks, has_draft)]
    several = [ProgramSpec("decode", size) for size in buckets.decodes if has_branches]
    rounds = [ProgramSpec("speculate", size) for size in buckets.speculates]
    first = [ProgramSpec("sample", rows[0], Detail.TOP_LOGPROBS), ProgramSpec("sample", rows[0])]
    first += [*rounds[:1], *several[:1], *(ProgramSpec("encode", size) for size in image_sizes)]
    return list(dict.fromkeys((*least, *decodes, *first, *forwards, *samples, *moves, *rounds, *several, *edited)))


def least_programs(
    buckets: BucketTable,
    move_sizes: Sequence[int],
    *,
    has_host_blocks: bool,
    has_adapters: bool = False,
    has_branches: bool = True,
    num_expert_arrays: int = 0,
    is_encoder: bool = False,
) -> list[ProgramSpec]:
    """Return the programs that any step can be padded to, one of each kind; large moves repeat the smallest program."""
    has_draft, edited = bool(buckets.speculates), ProgramSpec("edited", buckets.rows[-1])
    if is_encoder:
        return [
            *_forwards(buckets.tokens[-1:], has_draft=False),
            ProgramSpec("sample", buckets.rows[-1], Detail.TOP_LOGPROBS),
            TELLS[AuxKind.HIDDEN],
            ProgramSpec("copy", move_sizes[0]),
        ]
    return [
        *_forwards(buckets.tokens[-1:], has_draft=has_draft),
        ProgramSpec("sample", buckets.rows[-1], Detail.TOP_LOGPROBS),
        edited if has_branches else _with_logprobs(edited),
        *TELLS.values(),
        COUNT,
        *(ProgramSpec(kind, move_sizes[0]) for kind in _move_kinds(has_host_blocks, has_draft)),
        *((LOAD_ADAPTER,) if has_adapters else ()),
        *((EXPERT_LOAD,) if num_expert_arrays else ()),
        *(ProgramSpec("exchange_experts", number + 1) for number in range(num_expert_arrays)),
    ]


def _with_logprobs(spec: ProgramSpec) -> ProgramSpec:
    return dataclasses.replace(spec, detail=Detail.TOP_LOGPROBS)


def _forwards(sizes: Sequence[int], *, has_draft: bool) -> list[ProgramSpec]:
    """Return forwards, each followed by the draft's program of the same size if there is a draft."""
    kinds: tuple[Literal["forward", "draft"], ...] = ("forward", "draft") if has_draft else ("forward",)
    return [ProgramSpec(kind, size) for size in sizes for kind in kinds]


def _move_kinds(has_host_blocks: bool, has_draft: bool) -> tuple[MoveKind | DraftKind, ...]:
    swaps: tuple[MoveKind, ...] = ("swap_out", "swap_in") if has_host_blocks else ()
    return ("copy", *(("draft_copy",) if has_draft else ()), *swaps)


_COMPILER_OPTIONS: Mapping[str, Mapping[str, str]] = {
    # With tiles of 16 rows every step would first copy all stacked bfloat16 weights into them.
    "TPU7x": {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"},
}


_ROUNDED = {"xla_gpu_enable_triton_gemm": "False"}
"""With Triton tiles XLA for GPUs would widen 8-bit numbers to 16 bits before it multiplies them.

cuBLASLt passes them to the tensor cores unchanged. Other programs keep Triton tiles, which dequantize int8 weights in
registers.
"""


_OVERLAPPED: Mapping[str, str] = dict.fromkeys(
    (
        "xla_enable_async_all_reduce",
        "xla_tpu_enable_async_collective_fusion",
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        "xla_tpu_overlap_compute_collective_tc",
    ),
    "true",
) | {"xla_jf_crs_combiner_threshold_count": "1"}
"""Options with which XLA for TPUs runs an all-reduce within matmuls, and does not combine it with others."""


def compiler_options(
    device: jax.Device, formats: Collection[MatrixFormat] = (), *, overlaps_sums: bool = False
) -> dict[str, str] | None:
    """Return additional XLA options for programs of this device; None if there are none.

    Args:
        formats: of the matrices that the program multiplies all rows with.
        overlaps_sums: as of `Step`.
    """
    options = dict(_COMPILER_OPTIONS.get(device.device_kind, {}))
    if overlaps_sums and device.platform == "tpu" and _accepts_options(device, tuple(_OVERLAPPED.items())):
        options |= _OVERLAPPED
    if device.platform == "gpu" and _is_for_cublas(device, formats):
        options |= _ROUNDED
    return options or None


_UNKNOWN_OPTION = re.compile(r"(?:No such compile option: |While setting option )'?(\w+)")


@functools.cache
def _accepts_options(device: jax.Device, options: tuple[tuple[str, str], ...]) -> bool:
    """Return True if the compiler of a device accepts all of these options; log the first that it does not accept."""
    if device.process_index != jax.process_index():
        device = jax.local_devices()[0]  # the same kind: a process compiles for its own devices only
    scalar = jax.ShapeDtypeStruct((), np.float32, sharding=SingleDeviceSharding(device))
    try:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):  # programs have another mesh
            jax.jit(lambda x: x, compiler_options=dict(options)).lower(scalar).compile()
    except jax.errors.JaxRuntimeError as error:
        if (unknown := _UNKNOWN_OPTION.search(str(error))) is None:
            raise
        _LOG.warning(
            "the compiler for %s does not accept option %s: sums over devices do not overlap with matmuls",
            device.device_kind,
            unknown[1],
        )
        return False
    return True


def _is_for_cublas(device: jax.Device, formats: Collection[MatrixFormat]) -> bool:
    """Return True if all matmuls with 8-bit matrices also have 8-bit rows, and the device multiplies those."""
    ours = [form for form in formats if form.group_size is None and form.values in ("int8", "fp8")]
    hardware = identify_hardware(device)
    has_fp8 = hardware is not None and hardware.multiplies_fp8
    return bool(ours) and all(form.activations and (form.values == "int8" or has_fp8) for form in ours)


def program_caches(
    folder: Path | None, replicas: Sequence[Sequence[jax.Device]]
) -> tuple[Path | None, list[Path | None]]:
    """Return the folder of JAX's cache, and that of the executables of each replica; None for no cache.

    A TPU v6e halts when it runs a cached program on devices without device 0 (https://github.com/jax-ml/jax/issues/38004).
    So replicas without it compile at each start. JAX's cache belongs to the process, so it is off if there is one.

    Args:
        folder: of both caches; None for no cache.
        replicas: devices of each copy of the model.
    """
    can_load = [devices[0].platform != "tpu" or any(device.id == 0 for device in devices) for devices in replicas]
    kept = None if folder is None else folder / "kept"
    return (folder if all(can_load) else None), [kept if one else None for one in can_load]


def set_up_compile_cache(folder: Path | None) -> None:
    """Cache compiled programs in a folder, including small and quickly compiled ones; None turns the cache off.

    The cache is global: the last call decides. A folder that is not writable counts as None, because JAX would warn for
    each program.
    """
    if folder is not None and not _is_writable(folder):
        folder = None
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    # A process's first compilation decides whether a cache is in use, and JAX remembers it.
    compilation_cache.reset_cache()


def _is_writable(folder: Path) -> bool:
    """Return True if the folder exists, or can be created, and is writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


class _CompileCounters(threading.local):
    """Counters of JAX's compile events on this thread: JAX compiles on the calling thread."""

    num_compiled = 0
    num_from_cache = 0


told = _CompileCounters()


def _note(event: str) -> None:
    told.num_compiled += event == _COMPILED
    told.num_from_cache += event == _FROM_CACHE


monitoring.register_event_listener(lambda event, **_: _note(event))
monitoring.register_event_duration_secs_listener(lambda event, duration_secs, **_: _note(event))
