"""A server's programs on a mesh, as shapes: the step, its sizes, and the lowering of each program.

Nothing here allocates or compiles. The devices need not be attached: those of a topology description suffice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jpaged.config import EngineConfig
from jpaged.device.adapters import AdapterRoom, fill_slot, matrices_of
from jpaged.device.cascade_costs import cascade_costs
from jpaged.device.host_pool import num_host_blocks
from jpaged.device.linear import choose_linear_backend, params_for
from jpaged.device.mesh import (
    LOGITS_SPEC,
    POOL_SPEC,
    SCALES_SPEC,
    Placement,
    first_device,
    num_context_parts,
    num_shards,
    replicated,
)
from jpaged.device.programs.compile import ProgramSpec, compiler_options, program_specs
from jpaged.device.speculation.draft import DRAFT, abstract_draft_params, split_params, with_draft
from jpaged.device.speculation.lowered import lower_speculation
from jpaged.device.step.decode import packed_decode
from jpaged.device.step.forward import Step, forward_packing
from jpaged.device.step.runner import EDIT_WORDS, NUM_COUNT_WORDS, ROW_WORDS, DecodePacking
from jpaged.device.step_sizes import Attention
from jpaged.device.transfers import lower_move, move_sizes
from jpaged.engine.executor import BucketTable, Geometry
from jpaged.engine.executor.rows import NUM_SINGLES, num_mask_words
from jpaged.engine.executor.steps import TELL_IDS, Tell
from jpaged.kernels.sampling import FedSamplingKernel, SamplingKernel, choose_kernel
from jpaged.models.kv_groups import group_layers
from jpaged.models.layer_kinds import stacks_of
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.models.quantisation.tree import MatricesOf, dense_formats
from jpaged.models.stack import LayerMode

_HALVES_FROM = 256
"""Tokens of a step from which there are also programs of 1.5 times a power of two. CPUs do not compute padding."""
Lowering = Callable[[], jax.stages.Lowered]
_NUM_TOLD, _NUM_TOLD_ELSEWHERE = {"cpu": 512}, 256
"""Maximum positions per step with log-probabilities or hidden states beyond the sample."""
_NUM_STEPS, _NUM_STEPS_ELSEWHERE = {"cpu": 8}, 2
"""Maximum decode steps per dispatch: more on CPUs, where the host's share of the time is largest."""


def sized_step(
    model: Model,
    options: EngineConfig,
    layer_mode: LayerMode,
    num_blocks: int,
    mesh: Mesh,
    draft: Model | None = None,
) -> tuple[Step, Geometry]:
    """Return the step and its sizes for a number of blocks. Allocates and compiles nothing.

    Args:
        draft: the draft model, if the options require one.

    Raises:
        InvalidArgument: max_model_len is beyond the model's, the model cannot be split over the mesh, or a draft model
            does not match it.
        Unsupported: the chosen attention backend cannot run the model.
    """
    step, geometry = _sized_step(model, options, layer_mode, num_blocks, mesh)
    if draft is None or options.speculation is None:
        return step, geometry
    return with_draft(step, geometry, draft, options, options.speculation)


def _sized_step(
    model: Model, options: EngineConfig, layer_mode: LayerMode, num_blocks: int, mesh: Mesh
) -> tuple[Step, Geometry]:
    num_parts, num_contexts = num_shards(mesh), num_context_parts(mesh)
    attention = Attention.on(model, options, mesh)
    sizes = attention.sizes()
    chosen = attention.choose(sizes)
    vocab_size, model = model.config.vocab_size, Placement.of(model, mesh, layer_mode).model
    config, kinds = model.config, model.config.attention_kinds  # the chosen layout is one device's part
    stacks = list(stacks_of(config.layer_kinds).values()) if layer_mode == "scan" else None
    groups = group_layers([kind.sliding_window for kind in kinds], sizes.max_model_len, stacks)
    layout = dataclasses.replace(
        chosen.layout,
        num_layers=groups.num_layers,
        num_blocks=num_blocks,
        block_size=sizes.block_size,
        num_kv_heads=config.num_kv_heads,
        num_shards=num_parts,
        num_context_parts=num_contexts,
    )
    cascade = cascade_costs(chosen.backend, layout.local, kinds, config.num_heads // num_parts, num_contexts)
    max_num_steps = max_steps_of_dispatch(options, mesh)
    sampler = choose_kernel(chosen.backend, mesh.size, vocab_size)
    geometry = Geometry(
        num_blocks=num_blocks,
        block_size=layout.block_size,
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
        vocab_size=vocab_size,
        bytes_per_block=layout.bytes_per_block,
        buckets=BucketTable.build(
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_num_seqs=sizes.max_num_seqs,
            max_num_steps=max_num_steps,
            halves_from=None if first_device(mesh).platform == "cpu" else _HALVES_FROM,
        ),
        num_host_blocks=num_host_blocks(options.cache.swap_space, layout, options.parallel.data_parallel_size),
        cascade=cascade if options.cache.enable_cascade_attention else None,
        max_num_steps=max_num_steps,
        has_fed_steps=max_num_steps > 1 and _can_be_fed(sampler),
        windows=groups.windows,
        num_sink_tokens=max(kind.num_sink_tokens for kind in kinds),
        max_loras=options.lora.max_loras if options.lora.enable_lora else 0,
        num_told=min(sizes.max_num_batched_tokens, _NUM_TOLD.get(first_device(mesh).platform, _NUM_TOLD_ELSEWHERE)),
    )
    step = Step(
        model,
        layout,
        groups,
        layer_mode,
        num_places=geometry.buckets.rows[-1],
        num_told=geometry.num_told,
        vocab_size=vocab_size,
        mesh=mesh,
        backend=chosen.backend,
        linear_backend=choose_linear_backend(options.model.linear_backend, mesh, layer_mode),
        sampler=sampler,
        slots=AdapterRoom(geometry.max_loras, options.lora.max_lora_rank) if geometry.max_loras else None,
    )
    return step, geometry


def _can_be_fed(sampler: SamplingKernel | None) -> bool:
    """Return True if a program can wait for the host: it needs its own thread, which JAX's settings can disable."""
    return isinstance(sampler, FedSamplingKernel) and bool(jax.config.values["jax_cpu_enable_async_dispatch"])


def max_steps_of_dispatch(options: EngineConfig, mesh: Mesh) -> int:
    """Return the maximum decode steps per dispatch: one with several processes, which exchange single steps."""
    if _is_of_several_processes(mesh):
        return 1
    on_its_own = _NUM_STEPS.get(first_device(mesh).platform, _NUM_STEPS_ELSEWHERE)
    chosen = options.scheduler.num_scheduler_steps
    return chosen if chosen > 0 else on_its_own


def _is_of_several_processes(mesh: Mesh) -> bool:
    return len({device.process_index for device in mesh.devices.flat}) > 1


def abstract_serving(
    model: Model, options: EngineConfig, mesh: Mesh, layer_mode: LayerMode | None = None, draft: Model | None = None
) -> tuple[Step, Geometry, Params]:
    """Return a server's step, sizes and parameters on a mesh, as shapes; its devices need not be attached.

    `program_lowerings` lowers its programs. The number of blocks is `cache.num_blocks`, or the needs of the longest
    sequence: only a device can determine how many fit.

    Raises:
        InvalidArgument, Unsupported: as in `sized_step`.
    """
    where = Placement.of(model, mesh, layer_mode)
    num_blocks = options.cache.num_blocks
    if num_blocks is None:
        num_blocks = sized_step(model, options, where.layer_mode, 1, mesh)[1].num_blocks_of_longest
    step, geometry = sized_step(model, options, where.layer_mode, num_blocks, mesh, draft)
    params = params_for(step, where.abstract_params())
    layout = step.layout
    if layout.is_scaled:
        num_layers = len(geometry.windows) * layout.num_layers
        shape, sharding = (num_layers, layout.num_kv_heads, 2), NamedSharding(mesh, SCALES_SPEC)
        params["kv_scales"] = jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
    if step.draft is not None:
        params[DRAFT] = abstract_draft_params(step.draft, params)
    return step, geometry, params


_MULTIPLIED: Mapping[str, MatricesOf] = {"forward": "layers", "sample": "head", "decode": "all"}
"""The matrices that programs of each kind multiply with."""


def program_lowerings(step: Step, params: Params, geometry: Geometry) -> dict[ProgramSpec, Lowering]:
    """Return for each program the call that traces and lowers it.

    Args:
        params: may be shapes with shardings; includes the draft's parameters if there is a draft.
    """
    whole, of_pool = replicated(step.mesh), NamedSharding(step.mesh, POOL_SPEC)

    def shape(dims: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=whole)

    layout, model = step.layout, step.model
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.format), params)
    params, draft_params = split_params(params)
    device = first_device(step.mesh)
    options = {kind: compiler_options(device, dense_formats(model.config, part)) for kind, part in _MULTIPLIED.items()}
    head = {name: tree for name, tree in params.items() if name != "layers"}
    pool = jax.ShapeDtypeStruct(layout.shape, layout.storage_dtype, sharding=of_pool)
    last_tokens = shape((step.num_places,), np.int32)
    counts = step.abstract_counts(geometry.max_num_seqs)
    of_counts = jax.tree.map(lambda struct: struct.sharding, counts)
    hidden = shape((step.num_places + step.num_told, model.config.hidden_size), model.dtype)

    def lower(spec: ProgramSpec) -> jax.stages.Lowered:
        if spec.kind == "forward":
            packing = forward_packing(spec.size, geometry)
            forward = functools.partial(step.packed_forward, packing=packing)
            watches = step.draft is not None and step.draft.is_head
            outputs = (of_pool, whole, whole) if watches else (of_pool, whole)
            jitted = jax.jit(forward, donate_argnums=1, out_shardings=outputs, compiler_options=options["forward"])
            return jitted.lower(params, pool, last_tokens, shape((packing.size,), np.int32))
        if spec.kind == "decode":
            several = DecodePacking(forward_packing(spec.size, geometry), spec.size)
            decode = functools.partial(packed_decode, step, packing=several)
            results = of_pool, whole, whole
            jitted = jax.jit(decode, donate_argnums=1, out_shardings=results, compiler_options=options["decode"])
            return jitted.lower(params, pool, last_tokens, shape((several.size,), np.int32))
        if spec.kind in ("speculate", "draft", "draft_copy"):
            return lower_speculation(spec, step, geometry, (params, draft_params))
        if spec.kind == "load_adapter" and step.slots is not None:
            matrices = list(matrices_of(params).values())
            by_place = step.slots.shapes(model, step.layer_mode, step.mesh, has_slots=False)
            one = [by_place[path] for path in matrices_of(params)]
            shardings = jax.tree.map(lambda struct: struct.sharding, matrices)
            of_all = compiler_options(device)
            jitted = jax.jit(fill_slot, donate_argnums=0, out_shardings=shardings, compiler_options=of_all)
            return jitted.lower(matrices, shape((), np.int32), one)
        if spec.kind == "tell":
            # Each process must be able to read the whole result: its devices hold all columns together, or each holds
            # all.
            is_split = spec.tell == Tell.ALL_LOGPROBS and not _is_of_several_processes(step.mesh)
            told = NamedSharding(step.mesh, LOGITS_SPEC) if is_split else whole
            tell = functools.partial(step.tell, tell=spec.tell)
            jitted = jax.jit(tell, out_shardings=told, compiler_options=options["sample"])
            return jitted.lower(head, hidden, shape((spec.size * (1 + TELL_IDS),), np.int32))
        if spec.kind == "count":
            jitted = jax.jit(step.count, donate_argnums=0, out_shardings=of_counts)
            return jitted.lower(counts, shape((NUM_COUNT_WORDS + spec.size,), np.int32))
        if spec.kind == "edited":
            results, of_head = (of_counts, whole, whole), options["sample"]
            jitted = jax.jit(
                step.packed_edited_sample, donate_argnums=1, out_shardings=results, compiler_options=of_head
            )
            words = shape((spec.size * ROW_WORDS,), np.int32)
            edit_words = shape((spec.size * EDIT_WORDS + 1,), np.int32)
            mask = shape((spec.size, num_mask_words(step.vocab_size)), np.int32)
            singles = shape((spec.size, NUM_SINGLES, 3), np.int32)
            return jitted.lower(head, counts, hidden, words, edit_words, singles, mask)
        if spec.kind != "sample":
            return lower_move(spec, layout, step.mesh)
        sample = functools.partial(step.packed_sample, detail=spec.detail)
        jitted = jax.jit(sample, out_shardings=whole, compiler_options=options["sample"])
        return jitted.lower(head, hidden, shape((spec.size * ROW_WORDS,), np.int32))

    def lower_for_devices(spec: ProgramSpec) -> jax.stages.Lowered:
        # Kernels query the device that they are lowered for; a topology's devices are not among JAX's.
        with jax.sharding.use_abstract_mesh(step.mesh.abstract_mesh):
            return lower(spec)

    has_host_blocks, has_adapters = geometry.num_host_blocks > 0, geometry.max_loras > 0
    specs = program_specs(
        geometry.buckets, move_sizes(layout), has_host_blocks=has_host_blocks, has_adapters=has_adapters
    )
    return {spec: functools.partial(lower_for_devices, spec) for spec in specs}
