"""JaxExecutor: owns the parameters, the KV pool and the compiled programs, and runs steps in order of dispatch.

    move_blocks  BlockMoves -> copy[C], swap_out[C] or swap_in[C]                            returns at once
    load_adapter a slot and an adapter -> load_adapter -> the slot's matrices                returns at once
    forward      StepInputs -> one buffer -> forward[T] -> hidden states                     returns at once
    sample       hidden states, SamplingInputs -> sample[R] -> copy to host begins           returns at once
    decode       StepInputs, ... -> one buffer -> decode[R] -> copy to host begins              returns at once
    decode_fed   the same, and a feed for which its steps wait                                  returns at once
    speculate    StepInputs, ... -> one buffer -> speculate[R] -> copy to host begins           returns at once
    collect      waits for that copy -> StepOutputs; lands what has been swapped out

Nothing is traced here: the verbs call executables that `warm_up` compiled, with numpy buffers as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jpaged.config import EngineConfig
from jpaged.device.calibration import measure_rates
from jpaged.device.host_pool import HostPool, WholeHostBlocks
from jpaged.device.identity import kv_identity
from jpaged.device.kv_scales import measure_scales
from jpaged.device.linear import params_for
from jpaged.device.mesh import (
    CONTENTS_SPEC,
    POOL_SPEC,
    Placement,
    check_params,
    first_device,
    replicated,
    serving_mesh,
)
from jpaged.device.programs.compile import least_programs, program_specs, told
from jpaged.device.programs.compiler_errors import memory_refusals
from jpaged.device.programs.lowering import sized_step
from jpaged.device.programs.memory_plan import DeviceMemory, MemoryPlan, ProgramMemory, plan_memory
from jpaged.device.programs.saved import SavedPrograms, Target
from jpaged.device.programs.server_programs import ServerPrograms
from jpaged.device.programs.store import ProgramStore
from jpaged.device.speculation.draft import DRAFT, draft_params_for, split_params
from jpaged.device.speculation.drafter import drafter_of
from jpaged.device.speculation.packing import is_of_rounds, unpack_rounds
from jpaged.device.step.feeding import ProgramFeed
from jpaged.device.step.forward import Step, forward_packing
from jpaged.device.step.runner import DecodePacking, KVPool, PackedForward, StepRunner, unpack_outputs, unpack_told
from jpaged.device.step.told import ToldArrays
from jpaged.device.transfers import BlockMover, move_sizes
from jpaged.engine.executor import (
    I32,
    MAX_NUM_ROUNDS,
    BlockMoves,
    BucketTable,
    Detail,
    DeviceRates,
    Geometry,
    Progress,
    SamplingInputs,
    StepInputs,
    StepOutputs,
)
from jpaged.engine.executor.edits import num_mask_words
from jpaged.engine.executor.telling import TellInputs, ToldOutputs
from jpaged.errors import InternalError
from jpaged.kernels.sampling.cpu.feed import Feed
from jpaged.models.layers import Params
from jpaged.models.lora import HostAdapter
from jpaged.models.model import Model
from jpaged.models.stack import LayerMode
from jpaged.types import Adapter

_LOG = logging.getLogger(__name__)

Least = Callable[[int], int]
"""The smallest of what all processes say. Every process asks, in the same order, and waits for the others."""


class JaxExecutor:
    """Implements `engine.executor.Executor` on the devices of a mesh. Used by one thread, the engine's.

    Attributes:
        step: what runs: the model, its kernels and how it multiplies.
        host_blocks: the blocks of host memory; None where this process has none, or parts of them.
    """

    def __init__(
        self,
        served: ServerPrograms,
        params: Params,
        memory_plan: MemoryPlan,
        *,
        least: Least,
        waits_for_all: bool = True,
    ) -> None:
        """Allocates the pool. `create` is the way in; this takes what it decided."""
        step, geometry = served.step, served.geometry
        params, draft_params = split_params(params)
        self._served, self.step = served, step
        self._least = least
        self._geometry = geometry
        self._memory_plan = memory_plan
        self._waits_for_all = waits_for_all
        self._programs = ProgramStore(served.sources, self._note_ready)
        self.num_compiles_after_warm_up = 0
        self._rates: DeviceRates | None = None
        layout, mesh = step.layout, step.mesh
        self._pool = KVPool(layout, NamedSharding(mesh, POOL_SPEC))
        self._host = HostPool(layout, geometry.num_host_blocks, NamedSharding(mesh, CONTENTS_SPEC))
        self._mover = BlockMover(layout, self._pool, self._host)
        packings = {size: forward_packing(size, geometry) for size in geometry.buckets.tokens}
        several = {size: DecodePacking(forward_packing(size, geometry), size) for size in geometry.buckets.decodes}
        last_tokens = jax.device_put(np.zeros(step.num_places, np.int32), replicated(step.mesh))
        abstract = step.abstract_counts(geometry.max_num_seqs)
        shardings = jax.tree.map(lambda struct: struct.sharding, abstract)
        zeros = functools.partial(jax.tree.map, lambda struct: jnp.zeros(struct.shape, struct.dtype), abstract)
        counts = jax.jit(zeros, out_shardings=shardings)()
        self._runner = StepRunner(
            params, last_tokens, (packings, several), self._pool, self._programs, counts, geometry.vocab_size
        )
        self._told = ToldArrays()
        self._drafter = drafter_of(step, geometry, draft_params, self._runner, self._programs)
        identity = functools.partial(kv_identity, step, params)
        self.host_blocks = WholeHostBlocks(self._host, identity) if self._host.is_whole else None
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
        """Puts the parameters on the devices, settles the number of blocks and allocates the pool.

        Args:
            model: the network.
            params: of the model padded for the mesh (`jpaged.models.sharding`), in either layer mode.
            options: `cache`, `scheduler` and `model.max_model_len` are read; None is filled in, see `geometry`.
            mesh: where it runs; jax's first devices, as many as one copy of the model takes, when left out.
            num_pools: what the host's free memory is for, where it is the devices' memory: this pool, and those of so
                many executors less one that are made after it.
            least: settles a size with the other processes that the mesh is of; None where there are none.
            keep: a folder in which compiled programs are kept for the next time; None keeps none. The programs of
                several processes are not kept.
            draft: the model that proposes tokens, and its parameters, where `options.speculation` asks for one.

        Raises:
            InvalidArgument: options that contradict the model or the memory, parameters of other shapes, or a draft
                that does not go with the model.
        """
        folder = options.startup.compiled
        saved = None if folder is None else SavedPrograms.open(Path(folder))
        keep = keep if jax.process_count() == 1 else None
        if saved is not None and options.cache.num_blocks is None:
            cache = dataclasses.replace(options.cache, num_blocks=saved.target.num_blocks)
            options = dataclasses.replace(options, cache=cache)
        parallel = options.parallel
        mesh = mesh or serving_mesh(parallel.tensor_parallel_size, parallel.context_parallel_size)
        layer_mode: LayerMode = "loop" if isinstance(params["layers"], list) else "scan"

        def assemble(num_blocks: int) -> tuple[Step, Geometry]:
            return sized_step(model, options, layer_mode, num_blocks, mesh, draft and draft[0])

        if saved is not None:
            saved.check(Target.of(*assemble(options.cache.num_blocks or saved.target.num_blocks)))
        smallest = assemble(1)
        where = Placement.of(model, mesh, layer_mode)
        check_params(params, where.abstract_params())
        params = where.put(params)  # a tree of its own: the next line takes it apart
        params = params_for(smallest[0], params)
        if smallest[0].layout.is_scaled:
            params = {**params, "kv_scales": measure_scales(smallest[0], params)}
        if draft is not None and smallest[0].draft is not None:
            params = {**params, DRAFT: draft_params_for(smallest[0].draft, draft[1], params)}
        request = ServerPrograms.of(*smallest, params).pool_request(options.cache)
        memory = DeviceMemory.of(first_device(mesh), request.weight_bytes, mesh.size * num_pools)
        least = least or (lambda value: value)
        probe_blocks = least(request.probe_blocks(memory))

        def programs() -> ProgramMemory:
            # Those that were saved are for one size of the pool.
            probe = ServerPrograms.of(
                *assemble(probe_blocks if saved is None else saved.target.num_blocks), params, saved, keep
            )
            with memory_refusals():
                return probe.memory(probe.compile(probe.decisive_specs))

        memory_plan = plan_memory(request, memory, programs)
        memory_plan = dataclasses.replace(memory_plan, num_blocks=least(memory_plan.num_blocks))
        served = ServerPrograms.of(*assemble(memory_plan.num_blocks), params, saved, keep)
        # Steps are padded to what process 0 has: the others need to have it too.
        waits_for_all = options.startup.wait_for_all_programs or jax.process_count() > 1
        return cls(served, params, memory_plan, least=least, waits_for_all=waits_for_all)

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def memory_plan(self) -> MemoryPlan:
        """Where each byte of a device goes; after `warm_up` with what the compiled programs take."""
        return self._memory_plan

    @property
    def rates(self) -> DeviceRates:
        """The rates that `warm_up` measured."""
        if self._rates is None:
            raise InternalError("rates are measured by warm_up, which has not run")
        return self._rates

    def warm_up(self, progress: Progress) -> None:
        """Compiles what any step can be padded to, times some of it, and has the rest compiled in the background.

        With `wait_for_all_programs` there is no rest. Blocks are as they were when it returns.

        Raises:
            InvalidArgument: the compiler finds no room for one.
            InternalError: together they take more memory than the plan has.
        """
        _require_alive(self._is_shut_down)
        buckets, layout = self._geometry.buckets, self.step.layout
        has_host_blocks = self._geometry.num_host_blocks > 0
        make = program_specs if self._waits_for_all else least_programs
        has_adapters = self._geometry.max_loras > 0
        specs = make(buckets, move_sizes(layout), has_host_blocks=has_host_blocks, has_adapters=has_adapters)
        with memory_refusals():
            self._programs.compile(specs, progress)
        self._memory_plan = self._memory_plan.verified(self._served.memory(self._programs.ready))
        self._least(0)  # what runs from here on waits inside of collectives
        with self._calling("measuring rates failed"):
            self._rates = measure_rates(self._runner, self._mover, self._programs, self._geometry)
        self._programs.compile_rest(progress)

    def _note_ready(self) -> None:
        """Lets steps have the shapes that are ready. A sample that tells most does for one that tells less."""
        sizes = self._programs.sizes
        tokens, rows = sizes("forward"), sizes("sample", detail=Detail.TOP_LOGPROBS)
        if self.step.draft is not None:  # which is to be shown whatever the model runs
            tokens = tuple(size for size in tokens if size in sizes("draft"))
        if tokens and rows:
            buckets = BucketTable(tokens, rows, sizes("decode"), sizes("speculate"))
            self._geometry = dataclasses.replace(self._geometry, buckets=buckets)
        if len(self._programs.ready) == len(self._programs.specs):
            try:
                self._memory_plan = self._memory_plan.verified(self._served.memory(self._programs.ready))
            except InternalError as error:  # requests are running: they may yet end well
                _LOG.error("%s", error)

    def move_blocks(self, moves: BlockMoves) -> None:
        """Starts moving blocks; a block that is on its way to the host is waited for only when it is to come back.

        Raises:
            InternalError: an id names no block, or a fault of the device, after which the pool is spent.
        """
        with self._calling(f"{moves.move.value} of {len(moves.sources)} blocks failed"):
            self._mover.run(moves, self._programs)
            if self._drafter is not None:
                self._drafter.move(moves)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Starts writing an adapter over what a slot held; no step that is dispatched earlier sees it.

        Raises:
            InternalError: there is no such slot, or a fault of the device, after which the parameters are spent.
        """
        if not 1 <= slot <= self._geometry.max_loras or not isinstance(adapter, HostAdapter):
            raise InternalError(f"{adapter} for adapter slot {slot}; there are {self._geometry.max_loras}")
        with self._calling(f"loading an adapter into slot {slot} failed"):
            self._runner.load_adapter(slot, adapter)

    def forward(self, inputs: StepInputs | PackedForward) -> jax.Array:
        """Starts a forward; the arrays of `inputs` are copied before it returns.

        Args:
            inputs: or what `pack` of an executor of the same geometry made of them.

        Raises:
            InternalError: shapes of no compiled program, or a fault of the device, after which the pool is spent.
        """
        packed = inputs if isinstance(inputs, PackedForward) else self.pack(inputs)
        with self._calling(f"a forward of {packed.num_tokens} tokens failed"):
            return self._runner.forward(packed) if self._drafter is None else self._drafter.forward(packed)

    def pack(self, inputs: StepInputs) -> PackedForward:
        """A step's inputs in a fresh buffer.

        Raises:
            InternalError: shapes of no compiled program.
        """
        _require_alive(self._is_shut_down)
        return self._runner.pack(inputs)

    def sample(self, hidden: jax.Array, inputs: SamplingInputs) -> jax.Array:
        """Starts sampling from what a forward left, and the copy of the tokens to the host.

        Raises:
            InternalError: a number of rows of no compiled program, or a fault of the device.
        """
        with self._calling(f"a sample of {len(inputs.rows_r)} rows failed"):
            outputs = self._runner.sample(hidden, inputs)
            if self._drafter is not None:
                self._drafter.catch_up()
            return outputs

    def decode(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> jax.Array:
        """Starts several steps of rows that decode, and the copy of their tokens to the host.

        Raises:
            InternalError: shapes of no compiled program, or a fault of the device, after which the pool is spent.
        """
        with self._calling(f"{num_steps} steps of {len(sampling.rows_r)} rows failed"):
            return self._runner.decode(inputs, sampling, ending_token_ids_rx, num_steps)

    def decode_fed(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> tuple[jax.Array, ProgramFeed]:
        """Starts several steps that wait for masks, and the copy of their tokens to the host.

        Raises:
            InternalError: as `decode`; also where steps cannot be fed.
        """
        num_rows = len(sampling.rows_r)
        if not self._geometry.has_fed_steps:
            raise InternalError(f"{num_steps} steps are to wait for masks, and this device's cannot")
        feed = Feed.open(num_rows, num_mask_words(self._geometry.vocab_size))
        try:
            with self._calling(f"{num_steps} steps of {num_rows} rows with masks failed"):
                outputs = self._runner.decode(inputs, sampling, ending_token_ids_rx, num_steps, feed.number)
        except InternalError:
            feed.close()
            raise
        return outputs, ProgramFeed(feed, outputs)

    def speculate(
        self,
        inputs: StepInputs,
        sampling: SamplingInputs,
        ending_token_ids_rx: I32,
        num_left_r: I32,
        num_rounds: int,
        unseen: Sequence[StepInputs] = (),
    ) -> jax.Array:
        """Starts rounds of proposals, and the copy of what they gave to the host.

        Raises:
            InternalError: there is no draft model, shapes of no compiled program, or a fault of the device, after which
                the pools are spent.
        """
        if self._drafter is None or not 0 < num_rounds <= MAX_NUM_ROUNDS:
            raise InternalError(f"{num_rounds} rounds of proposals, of {MAX_NUM_ROUNDS} at most with a draft model")
        with self._calling(f"{num_rounds} rounds of {len(sampling.rows_r)} rows failed"):
            for step in unseen:
                self._drafter.show(self.pack(step))
            return self._drafter.speculate(inputs, sampling, ending_token_ids_rx, num_left_r, num_rounds)

    def tell(self, hidden: jax.Array, inputs: TellInputs) -> Callable[[], ToldOutputs]:
        """Starts telling of what a forward left, and the copy to the host; see `Executor.tell`.

        Raises:
            InternalError: a fault of the device, also when the results are waited for.
        """
        with self._calling(f"telling of {inputs.num_rows} hidden states failed"):
            wait = self._told.add(self._runner.tell(hidden, inputs))

        def collect() -> ToldOutputs:
            with self._calling("the device failed in telling of hidden states"):
                return unpack_told(wait(), inputs, self._geometry.vocab_size)

        return collect

    def is_done(self, handle: jax.Array) -> bool:
        """Whether the step has run; whether its results are on the host already is not asked."""
        array: Any = handle  # jax's annotations lack the method
        return bool(array.is_ready())

    def collect(self, handle: jax.Array) -> StepOutputs:
        """Waits for a step, and lands what has been swapped out.

        Raises:
            InternalError: the device failed in it.
        """
        with self._calling("the device failed in a step"):
            array, has_draft = np.asarray(handle), self._drafter is not None
            outputs = unpack_rounds(array) if has_draft and is_of_rounds(array) else unpack_outputs(array)
            if self._host.on_the_way:
                self._host.land_ready()
            return outputs

    def shutdown(self) -> None:
        """Frees parameters, pool and programs; steps that were not collected are lost. Idempotent."""
        self._is_shut_down = True
        self.host_blocks = None  # which would keep the parameters
        self._pool.release()
        self._host.release()
        self._runner.release()
        if self._drafter is not None:
            self._drafter.release()
        self._told.release()
        self._programs.release()

    @contextmanager
    def _calling(self, failure: str) -> Iterator[None]:
        """Counts the compiles of a call of programs, and raises an error of the device as ours, with what failed."""
        _require_alive(self._is_shut_down)
        num_before = told.num_compiled
        try:
            yield
        except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:  # collectives of CPUs raise ValueError
            raise InternalError(f"{failure}: {error}") from error
        finally:
            self.num_compiles_after_warm_up += told.num_compiled - num_before


def _require_alive(is_shut_down: bool) -> None:
    if is_shut_down:
        raise InternalError("the executor is shut down")
