"""The draft's parameters and pool, and the calls of the speculative programs."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax.sharding import NamedSharding

from jpaged.device.mesh import POOL_SPEC
from jpaged.device.programs.compile import ProgramSpec
from jpaged.device.programs.store import ProgramStore
from jpaged.device.speculation.by_head import HeadPool
from jpaged.device.speculation.draft import abstract_states
from jpaged.device.speculation.packing import SpeculatePacking
from jpaged.device.step.forward import Step
from jpaged.device.step.runner import DraftPool, KVPool, PackedForward, Pool, StepRunner
from jpaged.device.transfers import copies_of
from jpaged.engine.executor import I32, BlockMoves, Geometry, Move, SamplingInputs, StepInputs
from jpaged.errors import InternalError
from jpaged.models.layers import Params


class HeadPools:
    """Holds a head's keys, and its states of each block, while no program has them."""

    def __init__(self, keys: KVPool, states: Pool) -> None:
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
        runner: StepRunner,
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
        """Start the model over a step's tokens, as `StepRunner.forward`."""
        return self._runner.forward(packed)

    def catch_up(self) -> None:
        """Start the draft's pending work after the last forward; a draft model has none."""

    def move(self, moves: BlockMoves) -> None:
        """Start copies of blocks; other moves concern only the model."""
        self.catch_up()
        if moves.move is Move.COPY:
            for size, ids_2c in copies_of(moves, self._programs.sizes("draft_copy")):
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


def drafter_of(
    step: Step, geometry: Geometry, params: Params, runner: StepRunner, programs: ProgramStore
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
    pools = HeadPools(keys, Pool(states.shape, states.dtype, states.sharding))
    return HeadDrafter(params, pools, packings, runner, programs)
