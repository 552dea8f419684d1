"""The draft model or head next to the model: requirements, sizes, parameters and pool, and the calls of its programs.

Requirements and sizes are computed without allocation and compilation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
from jax.sharding import NamedSharding

from jpaged.config import EngineConfig, SpeculativeOptions
from jpaged.device.compilation.compile import ProgramSpec
from jpaged.device.compilation.program_registry import ProgramStore
from jpaged.device.context import most_rows
from jpaged.device.linear import choose_activation_dtype, choose_linear_backend, params_for
from jpaged.device.mesh import POOL_SPEC, MeshPlacement, check_params, first_device, num_shards, replicated
from jpaged.device.model_runner import DonatedArray, DraftPool, KVPool, ModelRunner, PackedForward
from jpaged.device.sharded_matmul import overlaps_sums
from jpaged.device.speculative.dispatch import SpeculatePacking
from jpaged.device.speculative.eagle import HeadPool
from jpaged.device.step import DraftStep, Step
from jpaged.device.step_sizes import DeviceAttention
from jpaged.device.transfers import iter_copies
from jpaged.engine.executor import I32, BlockMoves, Geometry, Move, SamplingInputs, StepInputs
from jpaged.errors import InternalError, InvalidArgument
from jpaged.kernels.paged_attention import Queries
from jpaged.kernels.paged_attention.api import IMPLEMENTATIONS
from jpaged.kernels.sampling import choose_kernel
from jpaged.models.eagle import EagleConfig, is_mtp
from jpaged.models.layer_kinds import KVGroups
from jpaged.models.layers import Params
from jpaged.models.model import Model

NAME = "speculative_config"
DRAFT = "draft"
"""Key of the draft's parameters in those of a step that has one."""
_EMBEDDING = "embed"
_OF_MTP = (_EMBEDDING, _EMBEDDING), ("lm_head", "lm_head"), ("target_norm", "norm")
"""Parameters that an MTP layer shares with its model; there is no `lm_head` if it is tied to the embedding."""
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
    watched, shared = _check_model(step, geometry, draft), tuple[tuple[str, str], ...]()
    if isinstance(draft.config, EagleConfig) and not draft.config.has_embedding:
        draft, shared = _with_embedding(draft, has_embedding=True), _OF_MTP[:1]
    elif is_mtp(draft.config):
        is_tied = draft.config.tie_word_embeddings
        shared = tuple(pair for pair in _OF_MTP if not (is_tied and pair[0] == "lm_head"))
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
    has_states, num_rows = step.model.config.num_recurrent_layers > 0, min(sizes[-1], geometry.max_num_seqs)
    geometry = dataclasses.replace(
        geometry,
        buckets=dataclasses.replace(geometry.buckets, speculates=sizes),
        num_speculative_tokens=num_tokens,
        num_draft_states=num_rows * num_tokens if has_states else 0,
    )
    group = geometry.windows.index(None)
    length = speculation.synthetic_acceptance_length
    pinned_length = None if length is None else round(1000 * length)
    return dataclasses.replace(
        step, draft=DraftStep(draft_step, group, num_tokens, watched, shared, pinned_length)
    ), geometry


def draft_params_for(draft: DraftStep, params: Params, model_params: Params) -> Params:
    """Return the draft's parameters on its device, as its programs take them, from the published parameters.

    Args:
        model_params: the target model's parameters, as its programs take them.

    Raises:
        InvalidArgument: they are of other shapes.
    """
    where = _placement(draft)
    check_params(params, where.abstract_params())
    return _with_shared(draft, params_for(draft.step, where.put(params)), model_params)


def abstract_draft_params(draft: DraftStep, model_params: Params) -> Params:
    """Return the shapes of `draft_params_for`."""
    return _with_shared(draft, params_for(draft.step, _placement(draft).abstract_params()), model_params)


def own_params(step: Step, params: Params) -> Params:
    """Return the parameters without those that the draft shares with the model."""
    if step.draft is None:
        return params
    shared = dict(step.draft.shared)
    return {**params, DRAFT: {name: tree for name, tree in params[DRAFT].items() if name not in shared}}


def _with_shared(draft: DraftStep, params: Params, model_params: Params) -> Params:
    return params | {name: model_params[of_model] for name, of_model in draft.shared}


def _placement(draft: DraftStep) -> MeshPlacement:
    """Return the placement of the draft's own parameters."""
    step = draft.step
    has_no_embedding = isinstance(step.model.config, EagleConfig) and bool(draft.shared)
    model = _with_embedding(step.model, has_embedding=False) if has_no_embedding else step.model
    return MeshPlacement.of(model, step.mesh, step.layer_mode)


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
    if (routes := step.abstract_routes) is not None:
        num_bytes += math.prod(routes.shape[1:]) * routes.dtype.itemsize
    if step.draft is None:
        return num_bytes
    model = step.draft.step.model
    state_bytes = model.config.hidden_size * model.dtype.itemsize if step.draft.is_head else 0
    return num_bytes + step.draft.step.layout.local.bytes_per_block + state_bytes


def abstract_states(draft: DraftStep) -> jax.ShapeDtypeStruct:
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
    """Check that the draft suits the target model; return the layers whose states a head takes."""
    config = draft.config
    if config.vocab_size != step.vocab_size:
        raise InvalidArgument(
            f"{NAME}.model",
            f"its vocabulary has {config.vocab_size} tokens and the model's has {step.vocab_size}; they must be equal",
        )
    if isinstance(config, EagleConfig):
        return _check_head(config, step)
    if is_mtp(config):
        return (step.model.config.num_layers,)
    if config.num_recurrent_layers:
        raise InvalidArgument(
            f"{NAME}.model",
            f"{config.architecture} has recurrent state, which draft models do not support; use another draft model",
        )
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
        return head.get_layers(config.num_layers)
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
    attention = DeviceAttention.on(draft, options, step.mesh)
    chosen = attention.choose(attention.sizes())
    where = MeshPlacement.of(draft, step.mesh)
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
    linear_backend = choose_linear_backend(options.model.linear_backend, step.mesh, where.layer_mode)
    # A draft model need not be quantized if the target is.
    activations = "model" if options.model.activation_dtype == "model" else "auto"
    return dataclasses.replace(
        step,
        model=where.model,
        layout=layout,
        kv_groups=groups,
        layer_mode=where.layer_mode,
        backend=chosen.backend,
        linear_backend=linear_backend,
        activation_dtype=choose_activation_dtype(activations, linear_backend, where.model.config),
        sampler=sampler,
        overlaps_sums=overlaps_sums(where.model, where.layer_mode, step.mesh, has_adapters=step.slots is not None),
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


class HeadPools:
    """Holds a head's keys, and its states of each block, while no program has them."""

    def __init__(self, keys: KVPool, states: DonatedArray) -> None:
        self._pools = keys, states

    def take(self) -> HeadPool:
        """Take both arrays; see `KVPool`."""
        keys, states = self._pools
        return keys.take(), states.take()

    def put(self, arrays: HeadPool) -> None:
        """Return both arrays; see `KVPool`."""
        for pool, array in zip(self._pools, arrays, strict=True):
            pool.put(array)

    def release(self) -> None:
        """Free both arrays; see `KVPool`."""
        for pool in self._pools:
            pool.release()


class Drafter:
    """Owns the draft's parameters and its pool, which has the same blocks as the model's.

    Swaps move no blocks of the draft's pool. After a swap-in the draft's blocks have other contents until it has run
    their tokens.

    Args:
        params: the draft's.
        pool: the draft's.
        packings: of rounds, by their number of rows.
        runner: of the model.
        programs: of both.
    """

    def __init__(
        self,
        params: Params,
        pool: DraftPool,
        packings: Mapping[int, SpeculatePacking],
        runner: ModelRunner,
        programs: ProgramStore,
    ) -> None:
        self._params = params
        self._pool = pool
        self._packings = packings
        self._runner = runner
        self._programs = programs

    def show(self, packed: PackedForward) -> None:
        """Start the draft over tokens that it has not seen."""
        program = self._programs.find(ProgramSpec("draft", packed.num_tokens))
        self._pool.put(program(self._params, self._pool.take(), packed.words))

    def forward(self, packed: PackedForward) -> jax.Array:
        """Start the model over a step's tokens, as `ModelRunner.forward`."""
        return self._runner.forward(packed)

    def catch_up(self) -> None:
        """Start the draft's pending work after the last forward; a draft model has none."""

    def move(self, moves: BlockMoves) -> None:
        """Start copies of blocks; other moves concern only the model."""
        self.catch_up()
        if moves.move is Move.COPY:
            for size, ids_2c in iter_copies(moves, self._programs.sizes("draft_copy")):
                program = self._programs.find(ProgramSpec("draft_copy", size))
                self._pool.put(program(self._pool.take(), ids_2c))

    def speculate(
        self,
        inputs: StepInputs,
        sampling: SamplingInputs,
        ending_token_ids_rx: I32,
        num_left_r: I32,
        num_rounds: int,
    ) -> jax.Array:
        """Start rounds of proposals; return the outputs as one array, with the copy to the host started."""
        self.catch_up()
        num_rows = len(sampling.rows_r)
        program = self._programs.find(ProgramSpec("speculate", num_rows))
        words = self._packings[num_rows].pack(inputs, sampling, ending_token_ids_rx, num_left_r, num_rounds)
        return self._runner.speculate(program, words, self._params, self._pool)

    def release(self) -> None:
        """Free the pool, and drop the parameters. Idempotent."""
        self._pool.release()
        self._params = {}


class HeadDrafter(Drafter):
    """Drafter of a head, which runs after each forward of the model and its sample, so that no token waits for it.

        forward n | sample n | draft n | forward n + 1 | ...

    Swapped-in blocks lack the head's keys.
    """

    _due: tuple[PackedForward, jax.Array, list[jax.Array]] | None = None

    def show(self, packed: PackedForward) -> None:
        """Raise: there are no hidden states of tokens that the model does not run again.

        Raises:
            InternalError: always.
        """
        raise InternalError(f"the head received {packed.num_tokens} tokens without their hidden states")

    def forward(self, packed: PackedForward) -> jax.Array:
        """Start the model over a step's tokens; see `Drafter`."""
        self.catch_up()
        last_tokens = self._runner.last_tokens
        hidden_se = self._runner.forward(packed)
        self._due = packed, last_tokens, self._runner.take_features()
        return hidden_se

    def catch_up(self) -> None:
        """Start the head over the tokens of the last forward, unless it has run them."""
        if self._due is None:
            return
        (packed, last_tokens, features), self._due = self._due, None
        program = self._programs.find(ProgramSpec("draft", packed.num_tokens))
        self._pool.put(program(self._params, self._pool.take(), last_tokens, packed.words, *features))

    def release(self) -> None:
        """Free the pool; see `Drafter`."""
        self._due = None
        super().release()


def build_drafter(
    step: Step, geometry: Geometry, params: Params, runner: ModelRunner, programs: ProgramStore
) -> Drafter | None:
    """Return the drafter of a step, with its own pool; None if the step has no draft."""
    draft = step.draft
    if draft is None:
        return None
    keys = KVPool(draft.step.layout, NamedSharding(step.mesh, POOL_SPEC))
    packings = {size: SpeculatePacking.of(size, geometry) for size in geometry.buckets.speculates}
    if not draft.is_head:
        return Drafter(params, keys, packings, runner, programs)
    states = abstract_states(draft)
    pools = HeadPools(keys, DonatedArray(states.shape, states.dtype, states.sharding))
    return HeadDrafter(params, pools, packings, runner, programs)
