"""JaxExecutor: owns the parameters, the KV pool and the compiled programs, and runs steps in order of dispatch.

    move_blocks  BlockMoves -> copy[C], swap_out[C] or swap_in[C]                            returns at once
    load_adapter a slot and an adapter -> load_adapter -> the slot's matrices                returns at once
    forward      StepInputs -> one buffer -> forward[T] -> hidden states                     returns at once
    sample       hidden states, SamplingInputs -> sample[R] -> copy to host begins           returns at once
    decode       StepInputs, ... -> one buffer -> decode[R] -> copy to host begins           returns at once
                 on GPUs: forward[R] and sample[R] for each step                             returns at once
    decode_with_masks  the same, with a channel of masks for which its steps wait            returns at once
    speculate    StepInputs, ... -> one buffer -> speculate[R] -> copy to host begins        returns at once
    collect      waits for that copy -> StepOutputs; finishes completed swap-outs

No method traces: they call executables that `warm_up` compiled and pass numpy buffers as they are.

`decode_with_masks` has a mask channel between the host and the running program on its CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jpaged.config import EngineConfig, ExpertBalanceOptions
from jpaged.device.compilation.aot_bundle import AOTBundle, CompileTarget
from jpaged.device.compilation.compile import least_programs, program_specs, told
from jpaged.device.compilation.executable_cache import kv_fingerprint
from jpaged.device.compilation.lowering import ServerPrograms, get_encoder_bytes, sized_step
from jpaged.device.compilation.memory_plan import (
    DeviceMemory,
    MemoryPlan,
    ProgramMemory,
    memory_refusals,
    plan_memory,
)
from jpaged.device.compilation.program_registry import ProgramStore
from jpaged.device.expert_balance import ExpertBalancer
from jpaged.device.kv_scales import add_scales, merge_scales
from jpaged.device.linear import LeafPacker, leaf_for, packer_for, params_for
from jpaged.device.logits_processors import TokenCounts
from jpaged.device.mesh import (
    MeshPlacement,
    check_params,
    contents_spec,
    first_device,
    pool_spec,
    replicated,
    serving_mesh,
)
from jpaged.device.model_runner import (
    NUM_TOKEN_COLUMNS,
    DecodePacking,
    KVPool,
    ModelRunner,
    PackedForward,
    PendingHostCopies,
    ServedPool,
    unpack_aux,
    unpack_outputs,
)
from jpaged.device.speculative.dispatch import is_of_rounds, unpack_rounds
from jpaged.device.speculative.drafter import DRAFT, build_drafter, draft_params_for, split_params
from jpaged.device.step import Step, forward_packing
from jpaged.device.step_costs import measure_rates
from jpaged.device.transfers import BlockMover, BlockPlace, HostPool, RoutePool, WholeHostBlocks, move_sizes
from jpaged.engine.executor import (
    I32,
    MAX_NUM_ROUNDS,
    BlockMoves,
    Bool,
    BucketTable,
    Detail,
    DeviceRates,
    ExpertStats,
    Geometry,
    Progress,
    SamplingInputs,
    SleepTag,
    StepDirective,
    StepInputs,
    StepOutputs,
    WeightUpdate,
)
from jpaged.engine.executor.aux_io import AuxInputs, AuxOutputs
from jpaged.engine.executor.io import num_mask_words
from jpaged.errors import InternalError, InvalidArgument, JpagedError, Unsupported
from jpaged.kernels.lora import AdaptedMatrix
from jpaged.kernels.sampling.cpu import Feed
from jpaged.models.layers import Params
from jpaged.models.lora import HostAdapter
from jpaged.models.model import Model, insert
from jpaged.models.stack import LayerMode
from jpaged.types import Adapter


@dataclass(frozen=True, slots=True)
class ProgramFeed:
    """An `engine.executor.MaskFeed`.

    Attributes:
        outputs: of the program.
    """

    feed: Feed
    outputs: jax.Array

    def give(self, mask_rw: I32, verdict: StepDirective) -> None:
        self.feed.give(mask_rw, verdict)

    def wait(self) -> tuple[I32, Bool] | None:
        outputs: Any = self.outputs  # jax's annotations lack the method
        is_over = False
        while (drawn := self.feed.wait()) is None and not is_over:
            is_over = outputs.is_ready()  # its last sampled tokens have been received by then
        return drawn

    def close(self) -> None:
        self.feed.close()


@dataclass(frozen=True, slots=True)
class ProgramInterrupt:
    """An `engine.executor.DecodeInterrupt`."""

    feed: Feed

    def interrupt(self) -> None:
        self.feed.interrupt()

    def close(self) -> int:
        num_steps = self.feed.num_steps()
        self.feed.close()
        return num_steps


_LOG = logging.getLogger(__name__)

JaxHandle = jax.Array | tuple[jax.Array, ...]
"""The outputs of a dispatch: of one program, or of the samples of several steps."""

LeafPath = tuple[str | int, ...]
"""Path of a leaf in the parameters."""


@runtime_checkable
class LeafUpdate(WeightUpdate, Protocol):
    """New weights, leaf by leaf, as `jpaged.checkpoints.weights.WeightReader` opens them.

    Attributes:
        folder: their folder; None for arrays.
        kv_scales_l2: see `ParamsPreparation`.
    """

    folder: Path | None
    kv_scales_l2: np.ndarray | None

    def leaves(self) -> Iterator[tuple[LeafPath, Any]]:
        """Yield leaves as `JaxExecutor.create` takes them, each with its path."""
        ...


class WeightSource(Protocol):
    """Reads weights as `JaxExecutor.create` takes them."""

    def read(self) -> Params:
        """Read those of the model's files again."""
        ...

    def open(self, weights: object) -> LeafUpdate:
        """Check new weights."""
        ...

    def set_folder(self, folder: Path) -> None:
        """Let `read` use another folder."""
        ...


@dataclass(frozen=True, slots=True)
class ParamsPreparation:
    """Parameters as read -> parameters as a step's programs take them.

    Attributes:
        step: of any number of blocks.
        where: the placement of the parameters as read.
        kv_scales_l2: scales of keys and values that the checkpoint has for the pool's type; None measures them.
    """

    step: Step
    where: MeshPlacement
    kv_scales_l2: np.ndarray | None = None

    def all(self, published: list[Params]) -> Params:
        """Return the parameters; takes the only reference to those as read, so that what is packed is freed at once."""
        params = published.pop()
        check_params(params, self.where.abstract_params())
        params = self.where.put(params)  # a new tree: the next line takes it apart
        return self.with_scales(params_for(self.step, params))

    def packer(self) -> LeafPacker | None:
        """Return the packer for the leaves of one update."""
        return packer_for(self.step)

    def leaf(self, packer: LeafPacker | None, path: LeafPath, leaf: Any, current: Any) -> Any:
        """Return one leaf for the place of `current`.

        Raises:
            InternalError: it differs from the current one in more than its numbers.
        """
        base = current.base if isinstance(current, AdaptedMatrix) else current
        leaf = leaf_for(self.step, packer, path, leaf, base)
        if _described(leaf) != _described(base):
            raise InternalError(f"the new leaf at {path} is {_described(leaf)}, not {_described(base)}")
        return dataclasses.replace(current, base=leaf) if isinstance(current, AdaptedMatrix) else leaf

    def with_scales(self, params: Params) -> Params:
        """Return the parameters with scales of keys and values, if the pool has scales."""
        return add_scales(self.step, params, self.kv_scales_l2) if self.step.layout.is_scaled else params


def _described(leaf: Any) -> tuple[Any, list[tuple[Any, ...]]]:
    arrays, tree = jax.tree.flatten(leaf)
    return tree, [(array.shape, array.dtype, array.sharding) for array in arrays]


Least = Callable[[int], int]
"""Return the minimum of a value over all processes. Every process calls it, in the same order, and waits for the
others."""


class DeviceSleeper:
    """Implements `engine.executor.Sleeper` for the pool and the parameters of one executor.

    On CPUs, weights are in host memory anyway, and level 1 does not move them.

    Args:
        holders: allocate the blocks and recurrent states.
        host: transfers in flight land there before the blocks are freed.
        runner: has the parameters.
        host_blocks: whose identity depends on the weights.
        is_on_host: the device uses host memory.
    """

    def __init__(
        self,
        holders: Sequence[KVPool | ServedPool],
        host: HostPool,
        runner: ModelRunner,
        host_blocks: WholeHostBlocks | None,
        preparation: ParamsPreparation,
        *,
        is_on_host: bool,
    ) -> None:
        self.can_reload = False
        self._holders = holders
        self._host = host
        self._runner = runner
        self._preparation = preparation
        self._reader: WeightSource | None = None
        self._host_blocks = host_blocks
        self._is_on_host = is_on_host
        self._is_pool_asleep = False
        self._offloaded: Params | None = None  # of arrays in host memory; {} for discarded parameters
        self._formats: Params = {}

    def set_reader(self, reader: WeightSource, *, can_reload: bool) -> None:
        """Let weights be updated, and with `can_reload` also discarded."""
        self._reader, self.can_reload = reader, can_reload

    def sleep(self, level: int) -> None:
        self._host.land_all()
        for holder in self._holders:
            holder.release()
        self._is_pool_asleep = True
        if level > 1:
            self.discard()
        elif self._offloaded is None and not self._is_on_host:
            self._offload()

    def wake_up(self, tag: SleepTag) -> None:
        if tag == "weights":
            self._restore()
        elif self._is_pool_asleep:
            for holder in self._holders:
                holder.renew()
            self._is_pool_asleep = False

    def _offload(self) -> None:
        params = self._runner.params
        self._formats = jax.tree.map(lambda leaf: leaf.format, params)
        arrays = {id(leaf): leaf for leaf in jax.tree.leaves(params)}  # some leaves share an array
        copies = {name: np.array(leaf) for name, leaf in arrays.items()}
        self._offloaded = jax.tree.map(lambda leaf: copies[id(leaf)], params)
        self._runner.set_params({})
        _delete(params)

    def _restore(self) -> None:
        if self._offloaded is None:
            return
        if self._offloaded:
            placed: dict[int, jax.Array] = {}

            def place(array: np.ndarray, where: Any) -> jax.Array:
                if id(array) not in placed:
                    placed[id(array)] = jax.device_put(array, where)
                return placed[id(array)]

            self._runner.set_params(jax.tree.map(place, self._offloaded, self._formats))
        else:
            assert self._reader is not None
            self._runner.set_params(self._preparation.all([self._reader.read()]))
            self._forget_identity()
        self._offloaded, self._formats = None, {}

    def check_update(self, weights: object) -> LeafUpdate:
        if self._reader is None:
            raise Unsupported("update_weights: the weights of this executor have no names")
        return self._reader.open(weights)

    def update(self, update: WeightUpdate) -> None:
        assert isinstance(update, LeafUpdate)
        kept_l2 = None if update.is_complete else self._preparation.kv_scales_l2
        scales_l2 = merge_scales(kept_l2, update.kv_scales_l2)
        self._preparation = dataclasses.replace(self._preparation, kv_scales_l2=scales_l2)
        try:
            if self._offloaded is not None:
                self._replace_all(update)
            else:
                self._replace_leaves(update)
        except BaseException as error:
            if self._offloaded is None:
                self.discard()  # never run with a mixture of both
            if isinstance(error, JpagedError) or not isinstance(error, Exception):
                raise
            raise InternalError(f"the weights could not be replaced: {type(error).__name__}: {error}") from error
        self._forget_identity()
        if update.folder is not None and update.is_complete and self._reader is not None:
            self._reader.set_folder(update.folder)

    def discard(self) -> None:
        if self._offloaded is None:
            params = self._runner.params
            self._runner.set_params({})
            _delete(params)
        self._offloaded, self._formats = {}, {}

    def _replace_all(self, update: LeafUpdate) -> None:
        """Replace weights that are not on the device."""
        if not update.is_complete:
            raise InvalidArgument(
                "weights", "have some of the model's tensors; while its weights are asleep, they must have all"
            )
        params = _empty_like(self._preparation.where.abstract_params())
        for path, leaf in update.leaves():
            insert(params, path, leaf)
        published = [params]
        del params
        self._runner.set_params(self._preparation.all(published))
        self._offloaded, self._formats = None, {}

    def _replace_leaves(self, update: LeafUpdate) -> None:
        """Replace one leaf after the other: each frees the memory of the former one."""
        params, packer = self._runner.params, self._preparation.packer()
        for path, leaf in update.leaves():
            place: Any = params
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = self._preparation.leaf(packer, path, leaf, place[path[-1]])
            self._runner.set_params(params)  # drops the other reference to the former leaf
        self._runner.set_params(self._preparation.with_scales(params))

    def _forget_identity(self) -> None:
        if self._host_blocks is not None:
            self._host_blocks.forget_identity()


def _empty_like(params: Params) -> Params:
    """Return the root of a tree of parameters without leaves, as `insert` fills it."""
    layers = params["layers"]
    return {"layers": [{} for _ in layers] if isinstance(layers, list) else {}}


def _delete(params: Params) -> None:
    """Free the device memory of parameters, even if other objects refer to them."""
    for leaf in jax.tree.leaves(params):
        leaf.delete()


class JaxExecutor:
    """Implements `engine.executor.Executor` on the devices of a mesh. Used only by the engine thread.

    Attributes:
        step: the traced step: the model, its kernels and its matmul backend.
        sleeper: releases the device memory; None with several processes, a draft model or EPLB.
        host_blocks: the blocks of host memory; None if this process has none, or only parts of each block.
        routed_experts: reads the experts of tokens; None if they are not kept.
    """

    def __init__(
        self,
        served: ServerPrograms,
        params: Params,
        memory_plan: MemoryPlan,
        *,
        least: Least,
        waits_for_all: bool = True,
        preparation: ParamsPreparation,
        eplb: ExpertBalanceOptions | None = None,
    ) -> None:
        """Allocate the pool. Call `create` instead; it decides these arguments."""
        step, geometry = served.step, served.geometry
        params, draft_params = split_params(params)
        self._served, self.step = served, step
        self._least = least
        self._geometry = geometry
        self._memory_plan = memory_plan
        self._waits_for_all = waits_for_all
        self._programs = self.programs = ProgramStore(served.sources, self._note_ready)
        self.num_compiles_after_warm_up = 0
        self._rates: DeviceRates | None = None
        layout, mesh = step.layout, step.mesh
        self._pool = KVPool(layout, NamedSharding(mesh, pool_spec(layout)))
        self._host = HostPool(layout, geometry.num_host_blocks, NamedSharding(mesh, contents_spec(layout)))
        self._mover = BlockMover(layout, self._pool, self._host)
        packings = {size: forward_packing(size, geometry) for size in geometry.buckets.tokens}
        several = {size: DecodePacking(forward_packing(size, geometry), size) for size in geometry.buckets.decodes}
        last_tokens = jax.device_put(np.zeros(step.max_sample_rows, np.int32), replicated(step.mesh))
        counts = _allocate_counts(step, 0 if geometry.is_encoder else geometry.max_num_seqs)
        states, routes = step.abstract_states(geometry.num_state_slots), step.abstract_routes
        served_pool = ServedPool(self._pool, states, step.abstract_expert_load(), routes)
        kinds = step.model.config.layer_kinds
        self.routed_experts = RoutePool.of(served_pool.routes, routes, geometry.num_host_blocks, kinds)
        self._runner = ModelRunner(
            params, last_tokens, (packings, several), served_pool, self._programs, counts, geometry, step.model.dtype
        )
        self._pending_copies = PendingHostCopies()
        load = served_pool.expert_load
        self._balancer = None if load is None or eplb is None else ExpertBalancer(step, eplb, load, self._programs)
        self._drafter = build_drafter(step, geometry, draft_params, self._runner, self._programs)
        self.host_blocks: WholeHostBlocks | None = None
        if self._host.is_whole:
            place = BlockPlace(layout, NamedSharding(mesh, contents_spec(layout)))
            read = functools.partial(self._mover.read, programs=self._programs)
            get_fingerprint = functools.partial(_get_fingerprint, step, self._runner)
            self.host_blocks = WholeHostBlocks(self._host, get_fingerprint, place, read)
        self.sleeper: DeviceSleeper | None = None
        if jax.process_count() == 1 and self._drafter is None and self._balancer is None:
            self.sleeper = DeviceSleeper(
                (self._pool, served_pool),
                self._host,
                self._runner,
                self.host_blocks,
                preparation,
                is_on_host=first_device(mesh).platform == "cpu",
            )
        self._is_shut_down = False

    @classmethod
    def create(
        cls,
        model: Model,
        params: Params,
        options: EngineConfig,
        *,
        mesh: Mesh | None = None,
        num_pools: int = 1,
        least: Least | None = None,
        keep: Path | None = None,
        draft: tuple[Model, Params] | None = None,
    ) -> JaxExecutor:
        """Put the parameters on the devices, decide the number of blocks and allocate the pool.

        Args:
            model: the network.
            params: of the model padded for the mesh (`jpaged.models.sharding`), in either layer mode; next to them
                may be "kv_scales", those of `ParamsPreparation`.
            options: `cache`, `scheduler` and `model.max_model_len` are read; None is filled in, see `geometry`.
            mesh: the devices to run on; by default JAX's first devices, enough for one copy of the model.
            num_pools: executors that share the host's free memory if devices use host memory: this one and those
                created later.
            least: agrees on a size with the other processes of the mesh; None for a single process.
            keep: a folder that caches compiled programs for the next start; None caches none. Several processes do not
                use it.
            draft: the draft model and its parameters, if `options.speculation` requires one.

        Raises:
            InvalidArgument: options that contradict the model or the memory, parameters of other shapes, or a draft
                model that does not match the model.
        """
        folder = options.startup.compiled
        saved = None if folder is None else AOTBundle.open(Path(folder))
        keep = keep if jax.process_count() == 1 else None
        if saved is not None and options.cache.num_blocks is None:
            cache = dataclasses.replace(options.cache, num_blocks=saved.target.num_blocks)
            options = dataclasses.replace(options, cache=cache)
        parallel = options.parallel
        sizes = parallel.tensor_parallel_size, parallel.context_parallel_size, parallel.pipeline_parallel_size
        mesh = mesh or serving_mesh(*sizes)
        layer_mode: LayerMode = "loop" if isinstance(params["layers"], list) else "scan"

        def assemble(num_blocks: int) -> tuple[Step, Geometry]:
            return sized_step(model, options, layer_mode, num_blocks, mesh, draft and draft[0])

        if saved is not None:
            saved.check(CompileTarget.of(*assemble(options.cache.num_blocks or saved.target.num_blocks)))
        smallest = assemble(1)
        where = MeshPlacement.of(model, mesh, layer_mode)

        preparation = ParamsPreparation(smallest[0], where, params.get("kv_scales"))
        published = [{name: part for name, part in params.items() if name != "kv_scales"}]
        del params
        params = preparation.all(published)
        if draft is not None and smallest[0].draft is not None:
            params = {**params, DRAFT: draft_params_for(smallest[0].draft, draft[1], params)}
        request = ServerPrograms.of(*smallest, params).pool_request(options.cache)
        encoder = get_encoder_bytes(model, options)
        request = dataclasses.replace(request, encoder_bytes=encoder.total)
        memory = DeviceMemory.of(first_device(mesh), request.weight_bytes + encoder.weights, mesh.size * num_pools)
        least = least or (lambda value: value)
        probe_blocks = least(request.probe_blocks(memory))

        def programs() -> ProgramMemory:
            # Saved programs are compiled for one pool size.
            probe = ServerPrograms.of(
                *assemble(probe_blocks if saved is None else saved.target.num_blocks), params, saved, keep
            )
            with memory_refusals():
                return probe.memory(probe.compile(probe.decisive_specs))

        memory_plan = plan_memory(request, memory, programs)
        memory_plan = dataclasses.replace(memory_plan, num_blocks=least(memory_plan.num_blocks))
        served = ServerPrograms.of(*assemble(memory_plan.num_blocks), params, saved, keep)
        waits_for_all = waits_for_all_programs(options, mesh)
        return cls(
            served,
            params,
            memory_plan,
            least=least,
            waits_for_all=waits_for_all,
            preparation=preparation,
            eplb=parallel.eplb,
        )

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def expert_stats(self) -> ExpertStats | None:
        """Counters of balanced experts; None if experts are not balanced."""
        return None if self._balancer is None else self._balancer.stats

    @property
    def waits_for_all(self) -> bool:
        """True if `warm_up` returns after all programs are compiled; False if some follow in the background."""
        return self._waits_for_all

    @property
    def memory_plan(self) -> MemoryPlan:
        """Planned memory use of a device; after `warm_up` includes the memory of compiled programs."""
        return self._memory_plan

    @property
    def rates(self) -> DeviceRates:
        """Rates that `warm_up` measured."""
        if self._rates is None:
            raise InternalError("rates are not measured: warm_up has not run")
        return self._rates

    def set_reader(self, reader: WeightSource, *, can_reload: bool) -> None:
        """Let weights be updated, and with `can_reload` also discarded."""
        if self.sleeper is not None:
            self.sleeper.set_reader(reader, can_reload=can_reload)

    def warm_up(self, progress: Progress) -> None:
        """Compile the programs that any step can be padded to, measure rates, and compile the rest in the background.

        With `wait_for_all_programs` all programs are compiled before it returns. Blocks keep their contents.

        Raises:
            InvalidArgument: the compiler finds no memory for a program.
            InternalError: together the programs take more memory than planned.
        """
        _require_alive(self._is_shut_down)
        buckets, layout = self._geometry.buckets, self.step.layout
        has_host_blocks = self._geometry.num_host_blocks > 0
        make = program_specs if self._waits_for_all else least_programs
        specs = make(
            buckets,
            move_sizes(layout),
            has_host_blocks=has_host_blocks,
            has_adapters=self._geometry.max_loras > 0,
            has_branches=self.step.has_branches,
            num_expert_arrays=sum(spec.kind == "exchange_experts" for spec in self._served.sources),
            is_encoder=self._geometry.is_encoder,
        )
        with memory_refusals():
            self._programs.compile(specs, progress)
        self._memory_plan = self._memory_plan.verified(self._served.memory(self._programs.ready))
        self._least(0)  # all processes wait here: the following calls wait inside collectives
        with self._calling("measuring rates failed"):
            self._rates = measure_rates(
                self._runner,
                self._mover,
                self._programs,
                self._geometry,
                is_padding_free=self.step.linear_backend == "cpu",
            )
        if self._balancer is not None:
            self._balancer.start(self._runner.params, self.step)
        if self.routed_experts is not None:
            self.routed_experts.warm_up()
        self._programs.compile_rest(progress)

    def _record_steps(self, num_steps: int) -> None:
        """Count dispatched steps, and move experts if it is time."""
        if self._balancer is not None:
            self._balancer.record_steps(self._runner.params, num_steps)

    def _note_ready(self) -> None:
        """Let steps use the shapes that are ready.

        A sample program with more log-probabilities also serves requests for fewer.
        """
        sizes = self._programs.sizes
        tokens, rows = sizes("forward"), sizes("sample", detail=Detail.TOP_LOGPROBS)
        if self.step.draft is not None:  # the draft model sees all tokens that the model runs
            tokens = tuple(size for size in tokens if size in sizes("draft"))
        if tokens and rows:
            decodes = sizes("decode")
            if not self.step.has_branches:
                known = self._served.geometry.buckets.decodes
                decodes = tuple(size for size in known if size in tokens and size in rows)
            buckets = BucketTable(tokens, rows, decodes, sizes("speculate"))
            self._geometry = dataclasses.replace(self._geometry, buckets=buckets)
        if len(self._programs.ready) == len(self._programs.specs):
            try:
                self._memory_plan = self._memory_plan.verified(self._served.memory(self._programs.ready))
            except InternalError as error:  # requests are running and may still succeed
                _LOG.error("%s", error)

    def move_blocks(self, moves: BlockMoves) -> None:
        """Start moving blocks. A swap-out still in flight is only waited for if a swap-in needs its block.

        Raises:
            InternalError: an id names no block, or the device failed, after which the pool is lost.
        """
        with self._calling(f"{moves.move.value} of {len(moves.sources)} blocks failed"):
            self._mover.run(moves, self._programs)
            if self.routed_experts is not None:
                self.routed_experts.run(moves)
            if self._drafter is not None:
                self._drafter.move(moves)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Start writing an adapter over the contents of a slot. Steps dispatched earlier still use the old contents.

        Raises:
            InternalError: there is no such slot, or the device failed, after which the parameters are lost.
        """
        if not isinstance(adapter, HostAdapter):
            raise InternalError(f"an adapter of type {type(adapter).__name__} cannot be loaded")
        if not 1 <= slot <= self._geometry.max_loras:
            raise InternalError(f"adapter slot {slot} does not exist: there are {self._geometry.max_loras} slots")
        with self._calling(f"loading an adapter into slot {slot} failed"):
            self._runner.load_adapter(slot, adapter)

    def forward(self, inputs: StepInputs | PackedForward) -> jax.Array:
        """Start a forward; the arrays of `inputs` are copied before it returns.

        Args:
            inputs: a step, or the result of `pack` of an executor of the same geometry.

        Raises:
            InternalError: shapes of no compiled program, or the device failed, after which the pool is lost.
        """
        packed = inputs if isinstance(inputs, PackedForward) else self.pack(inputs)
        with self._calling(f"a forward of {packed.num_tokens} tokens failed"):
            hidden = self._runner.forward(packed) if self._drafter is None else self._drafter.forward(packed)
            self._record_steps(1)
            return hidden

    def pack(self, inputs: StepInputs) -> PackedForward:
        """Pack a step's inputs into a new buffer.

        Raises:
            InternalError: shapes of no compiled program.
        """
        _require_alive(self._is_shut_down)
        return self._runner.pack(inputs)

    def sample(self, hidden: jax.Array, inputs: SamplingInputs) -> jax.Array:
        """Start sampling from a forward's hidden states, and the copy of the tokens to the host.

        Raises:
            InternalError: a number of rows of no compiled program, or the device failed.
        """
        with self._calling(f"a sample of {len(inputs.rows_r)} rows failed"):
            outputs = self._runner.sample(hidden, inputs)
            if self._drafter is not None:
                self._drafter.catch_up()
            return outputs

    def decode(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> JaxHandle:
        """Start several decode steps, and the copy of their tokens to the host.

        On GPUs the steps are dispatched one after another, and all of them run, whether rows end or not: the host
        cannot know without waiting, and a program that decides would make it wait.

        Raises:
            InternalError: shapes of no compiled program, or the device failed, after which the pool is lost.
        """
        if not self.step.has_branches:
            return self._decode_singly(inputs, sampling, num_steps)
        with self._calling(f"{num_steps} steps of {len(sampling.rows_r)} rows failed"):
            outputs = self._runner.decode(inputs, sampling, ending_token_ids_rx, num_steps)
            self._record_steps(num_steps)
            return outputs

    def _decode_singly(self, inputs: StepInputs, sampling: SamplingInputs, num_steps: int) -> tuple[jax.Array, ...]:
        outputs = [self.sample(self.forward(inputs), sampling)]
        for following in inputs.further(num_steps, self._geometry.block_size):
            sampling = sampling.of_next_step()
            outputs.append(self.sample(self.forward(following), sampling))
        return tuple(outputs)

    def decode_interruptibly(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> tuple[jax.Array, ProgramInterrupt]:
        """Start several decode steps that can be ended early, and the copy of their tokens to the host.

        Raises:
            InternalError: as `decode`; also if the device does not support such steps.
        """
        outputs, feed = self._decode_with_feed(inputs, sampling, ending_token_ids_rx, num_steps, 0)
        return outputs, ProgramInterrupt(feed)

    def decode_with_masks(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> tuple[jax.Array, ProgramFeed]:
        """Start several decode steps that wait for grammar masks, and the copy of their tokens to the host.

        Raises:
            InternalError: as `decode`; also if the device does not support such steps.
        """
        num_words = num_mask_words(self._geometry.vocab_size)
        outputs, feed = self._decode_with_feed(inputs, sampling, ending_token_ids_rx, num_steps, num_words)
        return outputs, ProgramFeed(feed, outputs)

    def _decode_with_feed(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int, num_words: int
    ) -> tuple[jax.Array, Feed]:
        """Start decode steps with a channel to the host for masks of `num_words` words; 0 for interrupts only."""
        steps = f"{num_steps} steps{' with masks' if num_words else ''}"
        if not self._geometry.has_fed_steps:
            raise InternalError(f"this device cannot run {steps} that the host can end")
        num_rows = len(sampling.rows_r)
        feed = Feed.open(num_rows, num_words)
        try:
            with self._calling(f"{steps} of {num_rows} rows failed"):
                outputs = self._runner.decode(inputs, sampling, ending_token_ids_rx, num_steps, feed.number)
                self._record_steps(num_steps)
        except InternalError:
            feed.close()
            raise
        return outputs, feed

    def speculate(
        self,
        inputs: StepInputs,
        sampling: SamplingInputs,
        ending_token_ids_rx: I32,
        num_left_r: I32,
        num_rounds: int,
        unseen: Sequence[StepInputs] = (),
    ) -> jax.Array:
        """Start rounds of speculative decoding with the draft model, and the copy of their tokens to the host.

        Raises:
            InternalError: there is no draft model, shapes of no compiled program, or the device failed, after which the
                pools are lost.
        """
        if self._drafter is None:
            raise InternalError("speculative rounds require a draft model")
        if not 0 < num_rounds <= MAX_NUM_ROUNDS:
            raise InternalError(f"{num_rounds} speculative rounds exceed the limit of {MAX_NUM_ROUNDS}")
        with self._calling(f"{num_rounds} rounds of {len(sampling.rows_r)} rows failed"):
            for step in unseen:
                self._drafter.show(self.pack(step))
            return self._drafter.speculate(inputs, sampling, ending_token_ids_rx, num_left_r, num_rounds)

    def compute_aux(self, hidden: jax.Array, inputs: AuxInputs) -> Callable[[], AuxOutputs]:
        """Start computing log-probabilities or hidden states from a forward's result, and their copy to the host.

        Raises:
            InternalError: the device failed; the returned function may raise it, too.
        """
        with self._calling(f"computing aux outputs of {inputs.num_rows} hidden states failed"):
            wait = self._pending_copies.add(self._runner.tell(hidden, inputs))

        def collect() -> AuxOutputs:
            with self._calling("the device failed to compute aux outputs"):
                return unpack_aux(wait(), inputs, self._geometry.vocab_size)

        return collect

    def is_done(self, handle: JaxHandle) -> bool:
        """Return True if the dispatch has run. Its results may not have reached the host yet."""
        array: Any = handle[-1] if isinstance(handle, tuple) else handle  # jax's annotations lack the method
        return bool(array.is_ready())

    def collect(self, handle: JaxHandle) -> StepOutputs:
        """Wait for a step's results, and finish the swap-outs that have arrived.

        Raises:
            InternalError: the device failed in the step.
        """
        with self._calling("the device failed during a step"):
            steps = [np.asarray(outputs) for outputs in (handle if isinstance(handle, tuple) else (handle,))]
            # Programs with log-probabilities stand in for others until those are compiled.
            array = np.stack([outputs[:, :NUM_TOKEN_COLUMNS] for outputs in steps]) if len(steps) > 1 else steps[0]
            has_draft = self._drafter is not None
            outputs = unpack_rounds(array) if has_draft and is_of_rounds(array) else unpack_outputs(array)
            if self._host.on_the_way:
                self._host.land_ready()
            return outputs

    def shutdown(self) -> None:
        """Free parameters, pool and programs; steps that were not collected are lost. Idempotent."""
        self._is_shut_down = True
        self.host_blocks = self.sleeper = None  # they reference the parameters
        self._pool.release()
        self._host.release()
        self._runner.release()
        if self._drafter is not None:
            self._drafter.release()
        if self._balancer is not None:
            self._balancer.release()
        self._pending_copies.release()
        self._programs.release()

    @contextmanager
    def _calling(self, failure: str) -> Iterator[None]:
        """Count compilations during a call of programs, and convert device errors to `InternalError`.

        Args:
            failure: begins the error's message.
        """
        _require_alive(self._is_shut_down)
        num_before = told.num_compiled
        try:
            yield
        except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:  # collectives of CPUs raise ValueError
            raise InternalError(f"{failure}: {error}") from error
        finally:
            self.num_compiles_after_warm_up += told.num_compiled - num_before


def waits_for_all_programs(options: EngineConfig, mesh: Mesh) -> bool:
    """Return True if a server on these devices compiles all programs before its first step.

    Process 0 of several pads steps to its ready programs, which the other processes must have, too. On GPUs the
    compiler times kernels on the serving device, which would delay steps.
    """
    if jax.process_count() > 1:
        return True
    chosen = options.startup.wait_for_all_programs
    return first_device(mesh).platform == "gpu" if chosen is None else chosen


def _require_alive(is_shut_down: bool) -> None:
    if is_shut_down:
        raise InternalError("the executor is shut down")


def _allocate_counts(step: Step, num_rows: int) -> TokenCounts:
    """Return the zero counts of sampled tokens for rows, on the step's devices."""
    abstract = step.abstract_counts(num_rows)
    shardings = jax.tree.map(lambda struct: struct.sharding, abstract)
    zeros = functools.partial(jax.tree.map, lambda struct: jnp.zeros(struct.shape, struct.dtype), abstract)
    return jax.jit(zeros, out_shardings=shardings)()


def _get_fingerprint(step: Step, runner: ModelRunner) -> bytes:
    return kv_fingerprint(step, runner.params)
