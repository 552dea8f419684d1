"""A server's programs on a mesh: their shapes and lowering, how each is made, and the memory that all of them take.

Lowering neither allocates nor compiles. The devices need not be attached: those of a topology description suffice.

`ServerPrograms` has the programs of a server with a pool of a given size. Their memory does not include weights and
pool. The largest program of each kind decides: working memory grows with tokens, rows and blocks. If only those are
compiled, the code of the others is assumed to be as large as theirs. A margin of an eighth and 16 MiB covers the error:
in a small model, a smaller program may take some MiB more than the largest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jpaged.config import CacheOptions, EngineConfig, LoraOptions, platform_default
from jpaged.device.compilation.aot_bundle import AOTBundle
from jpaged.device.compilation.compile import TELLS, ProgramSpec, compiler_options, program_specs
from jpaged.device.compilation.executable_cache import ExecutableCache
from jpaged.device.compilation.memory_plan import (
    GRAPH_NODE_BYTES,
    EncoderBytes,
    PoolRequest,
    ProgramMemory,
    ProgramReport,
    count_launches,
)
from jpaged.device.compilation.program_registry import NUM_THREADS, CompiledProgram, ProgramSource, ProgramStore
from jpaged.device.expert_balance import expert_arrays
from jpaged.device.linear import choose_activation_dtype, choose_linear_backend, params_for
from jpaged.device.lora import AdapterRoom, fill_slot, get_matrices
from jpaged.device.mesh import (
    LOGITS_SPEC,
    MeshPlacement,
    first_device,
    get_dp_size,
    local_bytes,
    num_context_parts,
    num_shards,
    num_stages,
    pool_spec,
    replicated,
    scales_spec,
)
from jpaged.device.model_runner import (
    EDIT_WORDS,
    MOST_BYTES,
    NUM_COUNT_WORDS,
    NUM_TOKEN_COLUMNS,
    ROW_WORDS,
    DecodePacking,
)
from jpaged.device.sharded_matmul import exchange_experts, overlaps_sums
from jpaged.device.speculative.drafter import (
    DRAFT,
    abstract_draft_params,
    own_params,
    pool_bytes_per_block,
    split_params,
    with_draft,
)
from jpaged.device.speculative.step import lower_speculation
from jpaged.device.step import Step, forward_packing
from jpaged.device.step_costs import cascade_costs
from jpaged.device.step_sizes import DeviceAttention, StepSizes
from jpaged.device.transfers import MAX_ON_THE_WAY, content_bytes, lower_move, move_sizes, num_host_blocks
from jpaged.engine.executor import MAX_NUM_STEPS, BucketTable, Geometry, Progress, StepDirective
from jpaged.engine.executor.aux_io import AUX_IDS, AuxKind
from jpaged.engine.executor.io import NUM_SINGLES, num_mask_words
from jpaged.errors import InvalidArgument
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.recurrence import StatefulPool, read_expert_load
from jpaged.kernels.sampling import FedSamplingKernel, RowSampling, SamplingKernel, choose_kernel
from jpaged.models.config import ModelConfig
from jpaged.models.layer_kinds import KVGroups, LayerKind, count_state_bytes, get_stacks, group_kinds, share_one_layer
from jpaged.models.layers import Params
from jpaged.models.model import MatricesOf, Model, dense_formats
from jpaged.models.sharding import with_redundant_experts
from jpaged.models.stack import LayerMode

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, Shaped

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
        num_blocks: usable blocks; with data-parallel attention, those of one device.
        draft: the draft model, if the options require one.

    Raises:
        InvalidArgument: max_model_len is beyond the model's, the model takes no embeddings or cannot be split over the
            mesh, or a draft model does not match it.
        Unsupported: the chosen attention backend cannot run the model.
    """
    check_recurrent(model.config, options, mesh)
    if model.config.is_encoder:
        options = options.for_encoder(model.config.architecture)
    step, geometry = _sized_step(model, options, layer_mode, num_blocks, mesh)
    if draft is None or options.speculation is None:
        return step, geometry
    return with_draft(step, geometry, draft, options, options.speculation)


def _sized_step(
    model: Model, options: EngineConfig, layer_mode: LayerMode, num_blocks: int, mesh: Mesh
) -> tuple[Step, Geometry]:
    num_parts, num_contexts, dp_size = num_shards(mesh), num_context_parts(mesh), get_dp_size(model.config, mesh)
    attention = DeviceAttention.on(model, options, mesh)
    chosen = attention.choose(sizes := attention.sizes())
    model = _without_refused(model, options, sizes)
    vocab_size, model = model.config.vocab_size, _placed_model(model, options, layer_mode, mesh)
    config, kinds = model.config, model.config.attention_kinds  # the chosen layout is one device's part
    groups, in_stages = _kv_groups(config.layer_kinds, sizes, layer_mode, mesh), num_stages(mesh)
    layout = _pool_layout(chosen.layout, config, groups, sizes, num_blocks, mesh)
    cascade = cascade_costs(chosen.backend, layout.local, kinds, config.num_heads * dp_size // num_parts, num_contexts)
    max_num_steps, sampler = max_steps_of_dispatch(options, mesh), choose_kernel(chosen.backend, mesh.size, vocab_size)
    geometry = Geometry(
        num_blocks=layout.num_blocks,
        block_size=layout.block_size,
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
        vocab_size=vocab_size,
        bytes_per_block=layout.bytes_per_block,
        buckets=_buckets(sizes, max_num_steps, mesh, dp_size),
        num_host_blocks=_num_host_blocks(options, layout, config),
        cascade=cascade if options.cache.enable_cascade_attention and dp_size == in_stages == 1 else None,
        max_num_steps=max_num_steps,
        has_fed_steps=max_num_steps > 1 and _can_be_fed(sampler, config),
        windows=groups.windows,
        num_sink_tokens=max(kind.num_sink_tokens for kind in kinds),
        max_loras=options.lora.max_loras if options.lora.enable_lora else 0,
        dp_size=dp_size,
        num_aux=_num_aux(sizes, config, first_device(mesh).platform),
        is_encoder=config.is_encoder,
        **_embed_fields(model, options),
        state_bytes=(state_bytes := count_state_bytes(config.layer_kinds, model.dtype)),
        state_checkpoint_interval=state_checkpoint_interval(
            options.cache,
            state_bytes,
            len(groups.windows) * layout.bytes_per_block if any(kind.num_places for kind in config.layer_kinds) else 0,
            layout.block_size,
        ),
    )
    step = Step(
        model,
        layout,
        groups,
        layer_mode,
        max_sample_rows=geometry.buckets.rows[-1],
        num_aux=geometry.num_aux,
        vocab_size=vocab_size,
        mesh=mesh,
        backend=chosen.backend,
        linear_backend=(linear := choose_linear_backend(options.model.linear_backend, mesh, layer_mode)),
        activation_dtype=choose_activation_dtype(options.model.activation_dtype, linear, model.config),
        sampler=sampler,
        slots=_adapter_room(options.lora),
        has_branches=has_cheap_branches(mesh),
        overlaps_sums=overlaps_sums(model, layer_mode, mesh, has_adapters=geometry.max_loras > 0),
        keeps_routes=_keeps_routes(options, config, groups),
        max_drafts=0 if options.speculation is None else options.speculation.num_speculative_tokens,
    )
    return step, geometry


def _keeps_routes(options: EngineConfig, config: ModelConfig, groups: KVGroups) -> bool:
    """Return True if the pool has the experts of tokens.

    Raises:
        InvalidArgument: the model has no experts, or its pool no slot for each token of a sequence.
    """
    if not options.model.enable_return_routed_experts:
        return False
    reason = ""
    if config.mixture is None or config.is_encoder:
        reason = "generates no tokens" if config.is_encoder else "has no experts"
    elif groups.windows[0] is not None:
        reason = f"keeps the keys of at most {groups.windows[0]} tokens, and their experts are stored with them"
    elif jax.process_count() > 1:
        reason = "runs in several processes"
    if reason:
        raise InvalidArgument("enable_return_routed_experts", f"is on, but {config.architecture} {reason}")
    return True


def _pool_layout(
    chosen: KVLayout, config: ModelConfig, groups: KVGroups, sizes: StepSizes, num_blocks: int, mesh: Mesh
) -> KVLayout:
    """Return the layout of the whole pool, from the one that attention chose for a device's part."""
    dp_size, in_stages = get_dp_size(config, mesh), num_stages(mesh)
    return dataclasses.replace(
        chosen,
        num_layers=groups.num_layers * in_stages,
        num_stages=in_stages,
        num_blocks=num_blocks * dp_size,
        block_size=sizes.block_size,
        num_kv_heads=config.num_kv_heads,
        num_shards=num_shards(mesh) // dp_size,
        num_context_parts=num_context_parts(mesh),
        dp_size=dp_size,
    )


def _placed_model(model: Model, options: EngineConfig, layer_mode: LayerMode, mesh: Mesh) -> Model:
    """Return the model as the devices run it: padded for their number, with redundant experts."""
    placed, eplb = MeshPlacement.of(model, mesh, layer_mode).model, options.parallel.eplb
    if eplb is None:
        return placed
    config = with_redundant_experts(placed.config, eplb.num_redundant_experts, num_shards(mesh))
    return dataclasses.replace(placed, config=config)


def _num_aux(sizes: StepSizes, config: ModelConfig, platform: str) -> int:
    """Return the maximum positions per step with aux outputs: all of an encoder, which computes prompts as a whole."""
    most = sizes.max_num_batched_tokens
    return most if config.is_encoder else min(most, _NUM_TOLD.get(platform, _NUM_TOLD_ELSEWHERE))


def _num_host_blocks(options: EngineConfig, layout: KVLayout, config: ModelConfig) -> int:
    """Return the blocks in host memory; none for an encoder, whose prompts are not swapped."""
    if config.is_encoder:
        return 0
    return num_host_blocks(options.cache.swap_space, layout, options.parallel.data_parallel_size)


def _adapter_room(lora: LoraOptions) -> AdapterRoom | None:
    """Return the slots for adapters; None without adapters."""
    if not lora.enable_lora:
        return None
    has_output, has_input = lora.enable_lm_head_lora, lora.enable_embedding_lora
    sizes = lora.max_loras, lora.max_lora_rank
    return AdapterRoom(*sizes, lora.enable_dora, has_output, has_input, lora.enable_expert_lora)


def _kv_groups(kinds: tuple[LayerKind, ...], sizes: StepSizes, layer_mode: LayerMode, mesh: Mesh) -> KVGroups:
    """Return the groups of the layers of each stage, which are equal."""
    of_stage = kinds[: len(kinds) // num_stages(mesh)]
    if not all(kind.attention.is_causal for kind in kinds):
        return share_one_layer(of_stage)
    stacks = list(get_stacks(of_stage).values()) if layer_mode == "scan" else None
    return group_kinds(of_stage, sizes.max_model_len, stacks)


_LEAST_CHECKPOINT_TOKENS = 128
_STATE_ONLY_CHECKPOINT_TOKENS = 2048


def state_checkpoint_interval(cache: CacheOptions, state_bytes: int, kv_bytes: int, block_size: int) -> int:
    """Return the tokens of the pool for each checkpoint of recurrent state; 0 without checkpoints.

    By default a checkpoint takes at most the bytes of the keys and values of these tokens.

    Args:
        kv_bytes: keys and values of `block_size` tokens, all layers; 0 without any.
    """
    if not state_bytes or not cache.enable_prefix_caching:
        return 0
    given = cache.state_checkpoint_interval
    chosen = _STATE_ONLY_CHECKPOINT_TOKENS if given is None else given
    if given is None and kv_bytes:
        chosen = max(_LEAST_CHECKPOINT_TOKENS, block_size * -(-state_bytes // kv_bytes))
    return -(-chosen // block_size) * block_size


def check_recurrent(config: ModelConfig, options: EngineConfig, mesh: Mesh) -> None:
    """Check that the options suit a model with recurrent layers.

    Raises:
        InvalidArgument: names the option that does not.
    """
    interval = options.cache.state_checkpoint_interval
    if not config.num_recurrent_layers:
        if interval is not None:
            raise InvalidArgument(
                "state_checkpoint_interval", f"is {interval}, but {config.architecture} has no recurrent state"
            )
        return
    options.check_recurrent(config.architecture)
    if _is_of_several_processes(mesh):
        raise InvalidArgument("num_processes", f"{config.architecture} has recurrent state, which needs one process")


def _largest_number(dtype: np.dtype) -> float:
    return float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]


def takes_images(config: ModelConfig, options: EngineConfig, sizes: StepSizes | None = None) -> bool:
    """Return True if requests may have images: the model has a vision encoder, and no option prevents its use.

    Args:
        sizes: of steps, which must have room for an image that is computed as a whole.
    """
    parallel, vision = options.parallel, config.vision
    if vision is None or not config.embed_width or (parallel.num_processes or 1) > 1 or options.has_draft:
        return False
    if vision.deep_layers and (parallel.pipeline_parallel_size > 1 or options.model.enable_prompt_embeds):
        return False
    if not vision.is_bidirectional:
        return True
    is_split = parallel.context_parallel_size > 1 or parallel.pipeline_parallel_size > 1 or parallel.enable_dp_attention
    if is_split or options.model.enable_prompt_embeds:
        return False
    return sizes is None or vision.num_tokens <= sizes.max_num_batched_tokens - sizes.max_num_seqs


def get_encoder_bytes(model: Model, options: EngineConfig) -> EncoderBytes:
    """Return the memory of a model's vision encoder; zero if images are refused."""
    if model.config.vision is None or not takes_images(model.config, options):
        return EncoderBytes(0, 0)
    from jpaged.device.vision import encoder_bytes  # only of models that have one

    return encoder_bytes(model.config.vision, model.dtype, options.model.max_model_len)


def _without_refused(model: Model, options: EngineConfig, sizes: StepSizes) -> Model:
    """Return the model without its vision encoder if images are refused."""
    if model.config.vision is None or takes_images(model.config, options, sizes):
        return model
    return dataclasses.replace(model, config=dataclasses.replace(model.config, vision=None))


def _embed_fields(model: Model, options: EngineConfig) -> dict[str, Any]:
    """Return the fields of `Geometry` about input embeddings and images."""
    config, width = model.config, _embed_width(model.config, options)
    return {
        "embed_width": width,
        "embed_max": _largest_number(model.dtype) if width else 0.0,
        "has_prompt_embeds": options.model.enable_prompt_embeds or not width,
        "has_rope_shifts": bool(width) and config.has_rope_axes,
        "image_tokens": 0 if config.vision is None else config.vision.num_whole_tokens,
    }


def _embed_width(config: ModelConfig, options: EngineConfig) -> int:
    """Return the width of the input embeddings that steps take; 0 without the option.

    Raises:
        InvalidArgument: the model does not take any.
    """
    if not options.model.enable_prompt_embeds:
        return config.embed_width if config.vision is not None else 0
    if config.is_encoder or not config.embed_width:
        reason = "generates nothing" if config.is_encoder else "has inputs of each layer that only tokens have"
        raise InvalidArgument("enable_prompt_embeds", f"True, but {config.architecture} {reason}")
    return config.embed_width


def blocks_of_rank(num_blocks: int | None, dp_size: int) -> int | None:
    """Return the chosen number of blocks of one device, if any.

    Raises:
        InvalidArgument: the devices cannot have equal numbers.
    """
    if num_blocks is not None and num_blocks % dp_size:
        raise InvalidArgument(
            "num_blocks", f"{num_blocks} blocks cannot be divided evenly among {dp_size} devices (enable_dp_attention)"
        )
    return None if num_blocks is None else num_blocks // dp_size


def _buckets(sizes: StepSizes, max_num_steps: int, mesh: Mesh, dp_size: int) -> BucketTable:
    buckets = BucketTable.build(
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_num_seqs=sizes.max_num_seqs,
        max_num_steps=max_num_steps,
        halves_from=None if first_device(mesh).platform == "cpu" else _HALVES_FROM,
        multiple=dp_size,
    )
    if has_cheap_branches(mesh):
        return buckets
    # Steps of R rows run as forward[R] and sample[R].
    return dataclasses.replace(buckets, decodes=tuple(size for size in buckets.decodes if size in buckets.tokens))


def has_cheap_branches(mesh: Mesh) -> bool:
    """Return False for GPUs: XLA copies the predicate of each branch and loop to the host, which waits for it."""
    return first_device(mesh).platform != "gpu"


def _can_be_fed(sampler: SamplingKernel | None, config: ModelConfig) -> bool:
    """Return True if a program can wait for the host: it needs its own thread, which JAX's settings can disable.

    A step that gets no mask runs again, which recurrent state does not allow.
    """
    is_fed = isinstance(sampler, FedSamplingKernel) and bool(jax.config.values["jax_cpu_enable_async_dispatch"])
    return is_fed and not config.num_recurrent_layers


def max_steps_of_dispatch(options: EngineConfig, mesh: Mesh) -> int:
    """Return the maximum decode steps per dispatch: one with several processes, which exchange single steps."""
    if _is_of_several_processes(mesh) or (jax.distributed.is_initialized() and jax.process_count() > 1):
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
    where = MeshPlacement.of(model, mesh, layer_mode)
    num_blocks = blocks_of_rank(options.cache.num_blocks, get_dp_size(model.config, mesh))
    if num_blocks is None:
        num_blocks = sized_step(model, options, where.layer_mode, 1, mesh)[1].num_blocks_of_longest
    step, geometry = sized_step(model, options, where.layer_mode, num_blocks, mesh, draft)
    params = params_for(step, where.abstract_params())
    layout = step.layout
    if layout.is_scaled:
        num_layers = len(geometry.windows) * layout.num_layers
        shape, sharding = (num_layers, layout.num_kv_heads, 2), NamedSharding(mesh, scales_spec(layout))
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
    whole, of_pool = replicated(step.mesh), NamedSharding(step.mesh, pool_spec(step.layout))

    def shape(dims: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=whole)

    layout, model = step.layout, step.model
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.format), params)
    params, draft_params = split_params(params)
    device = first_device(step.mesh)
    formats = {kind: dense_formats(model.config, part) for kind, part in _MULTIPLIED.items()}
    of_sample = compiler_options(device, formats["sample"])

    def options(spec: ProgramSpec) -> dict[str, str] | None:
        return compiler_options(device, formats[spec.kind], overlaps_sums=step.state_parts(spec.size)[1] > 1)

    head = {name: tree for name, tree in params.items() if name != "layers"}
    pool: Any = jax.ShapeDtypeStruct(layout.shape, layout.storage_dtype, sharding=of_pool)
    of_served: Any = of_pool
    states, load = step.abstract_states(geometry.num_state_slots), step.abstract_expert_load()
    routes = step.abstract_routes
    experts = list(expert_arrays(params, step).values())
    if states or load is not None or routes is not None:
        pool = StatefulPool(pool, states, load, routes)
        of_served = jax.tree.map(lambda struct: struct.sharding, pool)
    last_tokens = shape((step.max_sample_rows,), np.int32)
    counts = step.abstract_counts(geometry.max_num_seqs)
    of_counts = jax.tree.map(lambda struct: struct.sharding, counts)
    width = model.config.hidden_size + (step.slots is not None and step.slots.has_output)
    hidden = shape((step.max_sample_rows + step.num_aux, width), step.hidden_dtype)

    def lower(spec: ProgramSpec) -> jax.stages.Lowered:
        if spec.kind == "forward":
            packing = forward_packing(spec.size, geometry)
            forward = functools.partial(step.packed_forward, packing=packing)
            watches = step.draft is not None and step.draft.is_head
            outputs = (of_served, whole, whole) if watches else (of_served, whole)
            jitted = jax.jit(forward, donate_argnums=1, out_shardings=outputs, compiler_options=options(spec))
            embeds = [shape((spec.size, geometry.embed_width), model.dtype)] if geometry.embed_width else []
            return jitted.lower(params, pool, last_tokens, shape((packing.size,), np.int32), *embeds)
        if spec.kind == "decode":
            several = DecodePacking(forward_packing(spec.size, geometry), spec.size)
            decode = functools.partial(packed_decode, step, packing=several)
            results = of_served, whole, whole
            jitted = jax.jit(decode, donate_argnums=1, out_shardings=results, compiler_options=options(spec))
            return jitted.lower(params, pool, last_tokens, shape((several.size,), np.int32))
        if spec.kind in ("speculate", "draft", "draft_copy"):
            return lower_speculation(spec, step, geometry, (params, draft_params))
        if spec.kind == "load_adapter" and step.slots is not None:
            matrices = list(get_matrices(params).values())
            by_path = step.slots.shapes(model, step.layer_mode, step.mesh, has_slots=False)
            one = [by_path[path] for path in get_matrices(params)]
            shardings = jax.tree.map(lambda struct: struct.sharding, matrices)
            of_all = compiler_options(device)
            jitted = jax.jit(fill_slot, donate_argnums=0, out_shardings=shardings, compiler_options=of_all)
            return jitted.lower(matrices, shape((), np.int32), one)
        if spec.kind in ("expert_load", "exchange_experts"):
            return _lower_experts(spec, step, experts)
        if spec.kind == "tell":
            # Each process must be able to read the whole result: its devices hold all columns together, or each holds
            # all.
            is_split = spec.tell == AuxKind.ALL_LOGPROBS and not _is_of_several_processes(step.mesh)
            told = NamedSharding(step.mesh, LOGITS_SPEC) if is_split else whole
            tell = functools.partial(step.tell, tell=spec.tell)
            jitted = jax.jit(tell, out_shardings=told, compiler_options=of_sample)
            return jitted.lower(head, hidden, shape((spec.size * (1 + AUX_IDS),), np.int32))
        if spec.kind == "count":
            jitted = jax.jit(step.count, donate_argnums=0, out_shardings=of_counts)
            return jitted.lower(counts, shape((NUM_COUNT_WORDS + spec.size,), np.int32))
        stages = None if step.has_branches else spec.stages
        if spec.kind == "edited":
            results, of_head = (of_counts, whole, whole), of_sample
            fixed = None if stages is None else (spec.detail, stages)
            edited = functools.partial(step.packed_edited_sample, fixed=fixed)
            jitted = jax.jit(edited, donate_argnums=1, out_shardings=results, compiler_options=of_head)
            words = shape((spec.size * ROW_WORDS,), np.int32)
            edit_words = shape((spec.size * EDIT_WORDS + 1,), np.int32)
            mask = shape((spec.size, num_mask_words(step.vocab_size)), np.int32)
            singles = shape((spec.size, NUM_SINGLES, 3), np.int32)
            return jitted.lower(head, counts, hidden, words, edit_words, singles, mask)
        if spec.kind != "sample":
            return lower_move(spec, layout, step.mesh)
        sample = functools.partial(step.packed_sample, detail=spec.detail, stages=stages)
        jitted = jax.jit(sample, out_shardings=whole, compiler_options=of_sample)
        return jitted.lower(head, hidden, shape((spec.size * ROW_WORDS,), np.int32))

    def lower_for_devices(spec: ProgramSpec) -> jax.stages.Lowered:
        # Kernels query the device that they are lowered for; a topology's devices are not among JAX's.
        if spec.kind == "encode":
            return lower_image_encoder(spec, model, device)
        with jax.sharding.use_abstract_mesh(step.mesh.abstract_mesh):
            return lower(spec)

    has_host_blocks, has_adapters = geometry.num_host_blocks > 0, geometry.max_loras > 0
    specs = program_specs(
        geometry.buckets,
        move_sizes(layout),
        has_host_blocks=has_host_blocks,
        has_adapters=has_adapters,
        has_branches=step.has_branches,
        num_expert_arrays=len(experts),
        is_encoder=geometry.is_encoder,
        image_sizes=_image_sizes(model.config, geometry),
    )
    return {spec: functools.partial(lower_for_devices, spec) for spec in specs}


def _image_sizes(config: ModelConfig, geometry: Geometry) -> tuple[int, ...]:
    """Return the numbers of patches of the programs that encode images, which have up to `max_model_len` tokens."""
    if config.vision is None:
        return ()
    from jpaged.device.vision import call_sizes  # only of models that have an encoder

    return call_sizes(min(config.vision.max_patches, geometry.max_model_len * config.vision.num_merged))


def lower_image_encoder(spec: ProgramSpec, model: Model, device: jax.Device) -> jax.stages.Lowered:
    """Lower a program of the vision encoder, which runs on the first device."""
    from jpaged.device.vision import lower_encoder, packs_matrices  # only of models that have an encoder

    assert model.config.vision is not None
    return lower_encoder(model.config.vision, model.dtype, spec.size, device, packs=packs_matrices(device))


def _lower_experts(spec: ProgramSpec, step: Step, arrays: Sequence[Any]) -> jax.stages.Lowered:
    """Return a lowered program that reads the load of experts, or moves those of a layer.

    Args:
        arrays: one array of experts of each kind, or its shape.
    """
    whole, load = replicated(step.mesh), step.abstract_expert_load()
    if spec.kind == "expert_load":
        assert load is not None
        return jax.jit(read_expert_load, donate_argnums=0, out_shardings=(load.sharding, whole)).lower(load)
    leaf, is_stacked = arrays[spec.size - 1], step.layer_mode == "scan"
    exchange = functools.partial(exchange_experts, spec=leaf.sharding.spec, mesh=step.mesh, is_stacked=is_stacked)
    options = compiler_options(first_device(step.mesh))
    jitted = jax.jit(exchange, donate_argnums=0, out_shardings=leaf.format, compiler_options=options)
    layer = jax.ShapeDtypeStruct((), np.int32, sharding=whole)
    sources = jax.ShapeDtypeStruct(leaf.shape[is_stacked : is_stacked + 1], np.int32, sharding=whole)
    return jitted.lower(leaf, layer, sources)


_MARGIN, _MARGIN_BYTES = 8, 16 << 20  # divisor, and bytes, for programs that are not compiled yet
_OVERLAPPED = 2  # steps: one runs while the next one's inputs are made


@dataclass(frozen=True, slots=True)
class ServerPrograms:
    """The closed list of a server's programs.

    Attributes:
        step: the step whose programs they are.
        geometry: their sizes.
        sources: how each is made, most needed first.
        weight_bytes: of the parameters of one device.
    """

    step: Step
    geometry: Geometry
    sources: Mapping[ProgramSpec, ProgramSource]
    weight_bytes: int

    @classmethod
    def of(
        cls,
        step: Step,
        geometry: Geometry,
        params: Params,
        saved: AOTBundle | None = None,
        keep: Path | None = None,
    ) -> ServerPrograms:
        """Return the programs of a step, each loaded if it was saved and compiled otherwise, on demand.

        Args:
            params: may be shapes.
            saved: programs that were compiled elsewhere.
            keep: a folder that caches programs compiled here for the next start; None caches none.
        """
        kept = None if keep is None else ExecutableCache.of(keep, step, geometry, params)
        sources = {}
        for spec, lowering in program_lowerings(step, params, geometry).items():
            devices = tuple(step.mesh.devices.flat)[: 1 if spec.kind == "encode" else None]
            if saved is not None and saved.has(spec):
                sources[spec] = ProgramSource(functools.partial(saved.load, spec, devices), is_saved=True)
            elif kept is not None:
                cache = dataclasses.replace(kept, devices=devices)
                sources[spec] = ProgramSource(functools.partial(cache.make, spec, lowering))
            else:
                sources[spec] = ProgramSource.of(lowering)
        return cls(step, geometry, sources, local_bytes(own_params(step, params)))

    @property
    def decisive_specs(self) -> list[ProgramSpec]:
        """The largest program of each kind, in the order of the list; all programs of auxiliary outputs.

        Of `sample` it is the one with top log-probabilities and all stages; of `decode` none, which is a forward and a
        sample of no more tokens and rows; of `encode` none, whose memory is estimated.
        """
        return _decisive(self.sources)

    @property
    def adapter_bytes(self) -> int:
        """The part of weight_bytes that adapter slots take."""
        step = self.step
        if step.slots is None:
            return 0
        by_path = step.slots.shapes(step.model, step.layer_mode, step.mesh, has_slots=True)
        return local_bytes({"slots": list(by_path.values())})

    def compile(
        self,
        specs: Collection[ProgramSpec],
        progress: Progress = lambda what, done, total: None,
        num_threads: int | None = None,
    ) -> Mapping[ProgramSpec, CompiledProgram]:
        """Compile programs for inspection, without running them. The first failure ends it."""
        store = ProgramStore({spec: self.sources[spec] for spec in specs}, num_threads=num_threads or NUM_THREADS)
        store.compile(store.specs, progress)
        store.close()
        return store.ready

    def pool_request(self, cache: CacheOptions) -> PoolRequest:
        """Return the facts that decide how many blocks the pool has."""
        num_blocks = blocks_of_rank(cache.num_blocks, self.geometry.dp_size)
        return PoolRequest(
            bytes_per_block=pool_bytes_per_block(self.step),
            blocks_per_seq=self.geometry.num_blocks_of_longest,
            max_num_seqs=self.geometry.max_num_seqs_of_rank,
            max_model_len=self.geometry.max_model_len,
            memory_utilization=cache.memory_utilization
            or platform_default("memory_utilization", first_device(self.step.mesh).platform),
            weight_bytes=self.weight_bytes,
            state_bytes=self._state_bytes(self.geometry.num_running_states),
            checkpoint_bytes=self._state_bytes(1) - self._state_bytes(0),
            blocks_per_checkpoint=self.geometry.blocks_per_checkpoint,
            num_blocks=self._num_encoder_blocks if cache.num_blocks is None else num_blocks,
            pool_bytes=None if cache.num_blocks is not None else cache.kv_cache_memory_bytes,
            has_default_share=cache.memory_utilization is None,
        )

    def _state_bytes(self, num_slots: int) -> int:
        """Return the bytes of recurrent state on one device, with the slot for padding, and of expert counts."""
        return local_bytes({"states": [*self.step.abstract_states(num_slots), self.step.abstract_expert_load()]})

    @property
    def _num_encoder_blocks(self) -> int | None:
        """Blocks of an encoder's pool, which only holds the prompts of two steps; None for other models."""
        sizes = self.geometry
        if not sizes.is_encoder:
            return None
        of_step = sizes.max_num_batched_tokens // sizes.block_size + sizes.max_num_seqs
        return _OVERLAPPED * of_step + of_step // 4

    def memory(self, compiled: Mapping[ProgramSpec, CompiledProgram]) -> ProgramMemory:
        """Return the memory of all programs on one device; `compiled` has at least the decisive ones."""
        reports = {spec: ProgramReport.of(program.executable) for spec, program in compiled.items()}
        of_kind: dict[str, ProgramReport] = {spec.kind: reports[spec] for spec in _decisive(reports)}
        temps = {spec.kind: 0 for spec in reports}
        for spec, report in reports.items():
            temps[spec.kind] = max(temps[spec.kind], report.temp_bytes)
        # A step's forward, and whatever the device runs next to it: its sample, or the moves of the next step.
        # The next step's moves may also run next to a multi-step decode or to rounds of a draft model.
        several_bytes = max(temps.pop("decode", 0), temps.pop("speculate", 0))
        temps.pop("encode", 0)  # part of `PoolRequest.encoder_bytes`
        temp_bytes = max(temps.pop("forward"), several_bytes) + max(temps.values(), default=0)
        largest = of_kind["forward"]
        code_bytes = sum((reports.get(spec) or of_kind.get(spec.kind, largest)).code_bytes for spec in self.sources)
        if len(reports) < len(self.sources):
            temp_bytes += temp_bytes // _MARGIN + _MARGIN_BYTES
            code_bytes += code_bytes // _MARGIN
        kept_bytes = self._kept_bytes(of_kind) + self._aux_bytes(reports)
        return ProgramMemory(temp_bytes, kept_bytes, code_bytes, self._graph_bytes(compiled))

    def _graph_bytes(self, compiled: Mapping[ProgramSpec, CompiledProgram]) -> int:
        """Return the estimated bytes of CUDA graphs of all programs; 0 on other devices.

        The largest program of each kind stands for the others.
        """
        if first_device(self.step.mesh).platform != "gpu":
            return 0
        launches = {spec.kind: count_launches(compiled[spec].executable) for spec in _decisive(compiled)}
        return GRAPH_NODE_BYTES * sum(launches.get(spec.kind, launches["forward"]) for spec in self.sources)

    def _kept_bytes(self, of_kind: Mapping[str, ProgramReport]) -> int:
        buckets, layout = self.geometry.buckets, self.step.layout
        results = {kind: report.output_bytes - report.alias_bytes for kind, report in of_kind.items()}
        outputs = results["forward"] + max(results["sample"], results.get("edited", 0), results.get("speculate", 0))
        words = forward_packing(buckets.tokens[-1], self.geometry).size + buckets.rows[-1] * ROW_WORDS
        if not self.step.has_branches:  # each of several steps has its own
            words *= self.geometry.max_num_steps
        # several in flight to the host, one being read from the pool, one from the host
        moving = (MAX_ON_THE_WAY + 2) * content_bytes(layout) * layout.local.bytes_per_block // layout.bytes_per_block
        last_tokens = 4 * self.step.max_sample_rows
        loading = of_kind.get("load_adapter")
        if loading is not None:  # one adapter in flight to its slot
            moving += loading.argument_bytes - loading.alias_bytes
        if embed_width := self.geometry.embed_width:  # of two steps, and of those without any
            num_rows = _OVERLAPPED * buckets.tokens[-1] + sum(buckets.tokens)
            moving += num_rows * embed_width * self.step.model.dtype.itemsize
        return _OVERLAPPED * (outputs + 4 * words + last_tokens) + moving + self._edit_bytes(of_kind)

    def _edit_bytes(self, of_kind: Mapping[str, ProgramReport]) -> int:
        """Return the bytes of token counts, the logits processors of two steps, and their neutral values for each size.

        The words of logits processors accompany each step: records, token biases and masks.
        """
        sizes = sorted({spec.size for spec in self.sources if spec.kind == "edited"})
        row_words = EDIT_WORDS + 3 * NUM_SINGLES + num_mask_words(self.step.vocab_size)
        if not sizes:  # of an encoder
            return 0
        return of_kind["count"].alias_bytes + 4 * row_words * (sum(sizes) + _OVERLAPPED * max(sizes))

    def _aux_bytes(self, reports: Mapping[ProgramSpec, ProgramReport]) -> int:
        """Return the bytes that log-probabilities and hidden states of two steps take on the device, up to a limit.

        It assumes that every hidden state is requested.
        """
        num_hidden = self.step.max_sample_rows + self.step.num_aux
        tells = [(spec.size, reports[spec].output_bytes) for spec in TELLS.values() if spec in reports]
        largest = max(-(-num_hidden // size) * num_bytes for size, num_bytes in tells)
        return min(_OVERLAPPED * largest, max(MOST_BYTES, *(num_bytes for _, num_bytes in tells)))


def _decisive(specs: Collection[ProgramSpec]) -> list[ProgramSpec]:
    largest: dict[tuple[str, AuxKind], ProgramSpec] = {}
    for spec in specs:
        if spec.kind in ("decode", "encode"):
            continue
        best = largest.setdefault((spec.kind, spec.tell), spec)
        if (spec.size, spec.detail, spec.stages) > (best.size, best.detail, best.stages):
            largest[spec.kind, spec.tell] = spec
    return [spec for spec in specs if largest.get((spec.kind, spec.tell)) == spec]


_State = tuple[jax.Array, Any, jax.Array, jax.Array, jax.Array, jax.Array]
"""Number of steps run, the pool, the last tokens, ended rows, the outputs, and the newest step's verdict."""


@dataclass(frozen=True, slots=True)
class _Decode:
    """A dispatch on the device; `step` has the fields of `StepInputs` by name."""

    step: Mapping[str, jax.Array]
    num_steps: Int[Array, ""]
    feed: Int[Array, ""]
    ending_token_ids_rx: Int[Array, "R X"]
    how: RowSampling
    block_size: int

    @classmethod
    def of(cls, words: Int[Array, "W"], packing: DecodePacking, block_size: int) -> _Decode:
        """Unpack the buffer of a call."""
        step, (num_steps, feed), ending_rx, rows = packing.unpack(words)
        return cls(step, num_steps, feed, ending_rx, RowSampling(**rows), block_size)

    @property
    def is_used_r(self) -> Bool[Array, "R"]:
        """Rows in use, each of which has one token."""
        return jnp.arange(len(self.ending_token_ids_rx)) < self.step["num_rows"]

    def ends(self, ids_r: Int[Array, "R"]) -> Bool[Array, "R"]:
        """Return True for each row whose token ends it."""
        return jnp.any(ids_r[:, None] == self.ending_token_ids_rx, axis=1)

    def step_at(self, index: Int[Array, ""]) -> dict[str, jax.Array]:
        """Return the fields of one of the steps."""
        step, is_used_r = self.step, self.is_used_r
        kv_lens_s, tables_gsm = step["kv_lens_s"], step["block_tables_gsm"]
        is_used_s = jnp.arange(len(kv_lens_s)) < step["num_rows"]
        positions_r = step["positions_t"] + jnp.where(is_used_r, index, 0)
        rows_r = jnp.minimum(jnp.arange(len(positions_r)), len(kv_lens_s) - 1)
        blocks_gr = tables_gsm[:, rows_r, positions_r // self.block_size]
        slots_gr = blocks_gr * self.block_size + positions_r % self.block_size
        if "state_slots_s" in step:  # the first step has copied states that were shared
            step = {**step, "state_sources_s": jnp.where(index > 0, step["state_slots_s"], step["state_sources_s"])}
        return {
            **step,
            "positions_t": positions_r,
            "rope_lens_t": jnp.maximum(step["rope_lens_t"], positions_r + 1),
            "slots_gt": jnp.where(is_used_r, slots_gr, 0),
            "kv_lens_s": kv_lens_s + jnp.where(is_used_s, index, 0),
        }


def packed_decode(
    step: Step,
    params: Params,
    pool: Shaped[Array, "P B ..."] | StatefulPool,
    last_tokens_s: Int[Array, "S"],
    words: Int[Array, "W"],
    *,
    packing: DecodePacking,
) -> tuple[Shaped[Array, "P B ..."] | StatefulPool, Int[Array, "S"], Int[Array, "N R C"]]:
    """Run the steps on packed inputs until every row has ended.

    Returns:
        the pool, the tokens that the rows sampled last, and for each step the columns that `unpack_outputs` parses. A
        row that ended keeps its token; its later outputs are marked finite and must be ignored.
    """
    inputs = _Decode.of(words, packing, step.layout.block_size)
    first = inputs.step
    ids_r = jnp.where(first["is_prev_sampled_t"], last_tokens_s[first["prev_sampled_rows_t"]], first["token_ids_t"])
    has_ended_r = ~inputs.is_used_r | (first["is_prev_sampled_t"] & inputs.ends(ids_r))
    outputs_nrc = jnp.ones((MAX_NUM_STEPS, packing.num_rows, NUM_TOKEN_COLUMNS), jnp.int32)

    def goes_on(state: _State) -> jax.Array:
        index, _, _, has_ended_r, _, verdict = state
        return (index < inputs.num_steps) & ~jnp.all(has_ended_r) & (verdict == StepDirective.CONTINUE)

    def run(state: _State) -> _State:
        index, pool, ids_r, has_ended_r, outputs_nrc, _ = state
        hidden_re, pool = step.run(params, pool, ids_r, inputs.step_at(index))
        how = dataclasses.replace(inputs.how, positions_r=inputs.how.positions_r + index)
        sampled, verdict = step.sample_fed(params, hidden_re, how, inputs.feed, index)
        ids_r = jnp.where(has_ended_r | (verdict == StepDirective.VOID), ids_r, sampled.token_ids_r)
        columns_rc = jnp.stack([ids_r, (sampled.is_sound_r | has_ended_r).astype(jnp.int32)], axis=1)
        outputs_nrc = lax.dynamic_update_index_in_dim(outputs_nrc, columns_rc, index, 0)
        return index + 1, pool, ids_r, has_ended_r | inputs.ends(ids_r), outputs_nrc, verdict

    state: _State = jnp.int32(0), pool, ids_r, has_ended_r, outputs_nrc, jnp.int32(StepDirective.CONTINUE)
    _, pool, ids_r, _, outputs_nrc, _ = lax.while_loop(goes_on, run, state)
    return pool, jnp.pad(ids_r, (0, step.max_sample_rows - packing.num_rows)), outputs_nrc
