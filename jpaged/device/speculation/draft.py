"""The draft model or head next to the model: its requirements and sizes. Allocates and compiles nothing."""

from __future__ import annotations

import dataclasses

import jax

from jpaged.config import EngineConfig, SpeculativeOptions
from jpaged.device.linear import choose_linear_backend, params_for
from jpaged.device.mesh import Placement, check_params, first_device, num_shards, replicated
from jpaged.device.step.context import most_rows
from jpaged.device.step.forward import Draft, Step
from jpaged.device.step_sizes import Attention
from jpaged.engine.executor import Geometry
from jpaged.errors import InvalidArgument
from jpaged.kernels.paged_attention import Queries
from jpaged.kernels.paged_attention.backends import IMPLEMENTATIONS
from jpaged.kernels.sampling import choose_kernel
from jpaged.models.heads import EagleConfig
from jpaged.models.kv_groups import KVGroups
from jpaged.models.layers import Params
from jpaged.models.model import Model

NAME = "speculative_config"
DRAFT = "draft"
"""Key of the draft's parameters in those of a step that has one."""
_EMBEDDING = "embed"
_FEW_ROWS = (1, 2, 4)
"""Fewer rows than the smallest decode."""


def with_draft(
    step: Step, geometry: Geometry, draft: Model, options: EngineConfig, speculation: SpeculativeOptions
) -> tuple[Step, Geometry]:
    """Return the step with a draft model next to its own, and the geometry with the sizes of the speculative programs.

    Raises:
        InvalidArgument: the two models do not match, or an option is incompatible with a draft model.
        Unsupported: the chosen attention backend cannot run the draft.
    """
    _check_options(step, geometry, options)
    watched, shares_embedding = _check_model(step, geometry, draft), False
    if isinstance(draft.config, EagleConfig) and not draft.config.has_embedding:
        draft, shares_embedding = _with_embedding(draft, has_embedding=True), True
    draft_step = _draft_step(step, geometry, draft, options)
    num_tokens = speculation.num_speculative_tokens
    wanted = _wanted_rows(geometry, speculation, first_device(step.mesh).platform)
    sizes = tuple(size for size in wanted if _fits(step, draft_step, geometry, size * (num_tokens + 1)))
    if not sizes:
        raise InvalidArgument(
            f"{NAME}.num_speculative_tokens",
            f"{num_tokens} proposals and a token of {wanted[0]} rows exceed the {geometry.max_num_batched_tokens} "
            "tokens of a step (max_num_batched_tokens)",
        )
    geometry = dataclasses.replace(
        geometry,
        buckets=dataclasses.replace(geometry.buckets, speculates=sizes),
        num_speculative_tokens=num_tokens,
    )
    group = geometry.windows.index(None)
    return dataclasses.replace(step, draft=Draft(draft_step, group, num_tokens, watched, shares_embedding)), geometry


def draft_params_for(draft: Draft, params: Params, model_params: Params) -> Params:
    """Return the draft's parameters on its device, as its programs take them, from the published parameters.

    Args:
        model_params: the target model's parameters, as its programs take them.

    Raises:
        InvalidArgument: they are of other shapes.
    """
    where = _placement(draft)
    check_params(params, where.abstract_params())
    return _with_shared(draft, params_for(draft.step, where.put(params)), model_params)


def abstract_draft_params(draft: Draft, model_params: Params) -> Params:
    """Return the shapes of `draft_params_for`."""
    return _with_shared(draft, params_for(draft.step, _placement(draft).abstract_params()), model_params)


def own_params(step: Step, params: Params) -> Params:
    """Return the parameters without those that the draft shares with the model."""
    if step.draft is None or not step.draft.shares_embedding:
        return params
    return {**params, DRAFT: {name: tree for name, tree in params[DRAFT].items() if name != _EMBEDDING}}


def _with_shared(draft: Draft, params: Params, model_params: Params) -> Params:
    return {**params, _EMBEDDING: model_params[_EMBEDDING]} if draft.shares_embedding else params


def _placement(draft: Draft) -> Placement:
    """Return the placement of the draft's own parameters."""
    step = draft.step
    model = _with_embedding(step.model, has_embedding=False) if draft.shares_embedding else step.model
    return Placement.of(model, step.mesh, step.layer_mode)


def _with_embedding(head: Model, *, has_embedding: bool) -> Model:
    """Return the head with or without an embedding among its parameters."""
    assert isinstance(head.config, EagleConfig)
    return Model(dataclasses.replace(head.config, has_embedding=has_embedding), head.dtype)


def split_params(params: Params) -> tuple[Params, Params]:
    """Return the model's parameters and the draft's; the latter are empty without a draft."""
    return {name: tree for name, tree in params.items() if name != DRAFT}, params.get(DRAFT, {})


def pool_bytes_per_block(step: Step) -> int:
    """Return the bytes that one device holds of a block in all pools of a step."""
    num_bytes = step.layout.local.bytes_per_block
    if step.draft is None:
        return num_bytes
    model = step.draft.step.model
    state_bytes = model.config.hidden_size * model.dtype.itemsize if step.draft.is_head else 0
    return num_bytes + step.draft.step.layout.local.bytes_per_block + state_bytes


def abstract_states(draft: Draft) -> jax.ShapeDtypeStruct:
    """Return the shape of the states that a head keeps next to its keys, `[N + 1, E]`; see `by_head`."""
    step = draft.step
    shape = step.layout.blocks_per_layer, step.model.config.hidden_size
    return jax.ShapeDtypeStruct(shape, step.model.dtype, sharding=replicated(step.mesh))


def _check_options(step: Step, geometry: Geometry, options: EngineConfig) -> None:
    if options.lora.enable_lora:
        raise InvalidArgument(NAME, "a draft model cannot be combined with adapters: enable_lora is True")
    if None not in geometry.windows:
        raise InvalidArgument(
            NAME, f"a draft model requires model layers with full attention; they have windows of {geometry.windows}"
        )


def _check_model(step: Step, geometry: Geometry, draft: Model) -> tuple[int, ...]:
    """Check the draft's vocabulary and length against the target model; return the layers whose states a head takes."""
    config = draft.config
    if config.vocab_size != step.vocab_size:
        raise InvalidArgument(
            f"{NAME}.model",
            f"its vocabulary has {config.vocab_size} tokens and the model's has {step.vocab_size}; they must be equal",
        )
    if isinstance(config, EagleConfig):
        return _check_head(config, step)
    if config.max_model_len < geometry.max_model_len:
        raise InvalidArgument(
            f"{NAME}.model",
            f"its limit is {config.max_model_len} tokens, but max_model_len is {geometry.max_model_len}: lower it, or "
            "use another draft model",
        )
    return ()


def _check_head(head: EagleConfig, step: Step) -> tuple[int, ...]:
    """Check a head against the model's hidden states; return the layers whose states it takes."""
    field, config = f"{NAME}.model", step.model.config
    if head.target_hidden_size != config.hidden_size:
        raise InvalidArgument(
            field,
            f"the head requires hidden states of size {head.target_hidden_size}, but the model's have size "
            f"{config.hidden_size}",
        )
    if not head.has_embedding and head.hidden_size != config.hidden_size:
        raise InvalidArgument(
            field,
            f"the head has no embed_tokens, and the model's have size {config.hidden_size}, not {head.hidden_size}",
        )
    try:
        return head.layers_of(config.num_layers)
    except InvalidArgument as error:
        raise InvalidArgument(field, str(error)) from error


def _draft_step(step: Step, geometry: Geometry, draft: Model, options: EngineConfig) -> Step:
    """Return the draft's own step: it shares blocks and rows with the model, and stores keys and values unquantized."""
    options = options.replace(
        block_size=geometry.block_size,
        max_num_seqs=geometry.max_num_seqs,
        max_num_batched_tokens=geometry.max_num_batched_tokens,
        max_model_len=geometry.max_model_len,
        kv_cache_dtype="auto",
    )
    attention = Attention.on(draft, options, step.mesh)
    chosen = attention.choose(attention.sizes())
    where = Placement.of(draft, step.mesh)
    config = where.model.config
    groups = KVGroups((None,), config.num_layers, tuple((0, layer) for layer in range(config.num_layers)))
    num_parts = num_shards(step.mesh)
    layout = dataclasses.replace(  # the chosen layout is one device's part
        chosen.layout,
        num_blocks=step.layout.num_blocks,
        block_size=step.layout.block_size,
        num_kv_heads=config.num_kv_heads,
        num_shards=num_parts,
        num_context_parts=step.layout.num_context_parts,
    )
    sampler = choose_kernel(chosen.backend, step.mesh.size, step.vocab_size)
    return dataclasses.replace(
        step,
        model=where.model,
        layout=layout,
        kv_groups=groups,
        layer_mode=where.layer_mode,
        backend=chosen.backend,
        linear_backend=choose_linear_backend(options.model.linear_backend, step.mesh, where.layer_mode),
        sampler=sampler,
    )


def _wanted_rows(geometry: Geometry, speculation: SpeculativeOptions, platform: str) -> list[int]:
    """Return the numbers of rows that speculative rounds are compiled for.

    On a CPU a padding row costs the same as any other, times the number of proposals, so there are more sizes.
    """
    rows, most = geometry.buckets.rows, speculation.disable_by_batch_size
    sizes = sorted({*_FEW_ROWS, *rows}) if platform == "cpu" else rows
    return [size for size, smaller in zip(sizes, (0, *sizes), strict=False) if most is None or smaller < most]


def _fits(step: Step, draft: Step, geometry: Geometry, num_in_round: int) -> bool:
    """Return True if a round of this many tokens is no larger than a step, and both kernels support its rows."""

    def can_run(step: Step) -> bool:
        num_heads = step.model.config.num_heads // num_shards(step.mesh)
        num_rows = most_rows(num_in_round, num_in_round, step.layout.num_context_parts)
        queries = Queries(num_heads, step.model.dtype, num_rows, geometry.max_blocks_per_seq, num_in_round)
        return IMPLEMENTATIONS[step.backend].unsupported_reason(step.layout.local, queries) is None

    return num_in_round <= geometry.max_num_batched_tokens and can_run(step) and can_run(draft)
