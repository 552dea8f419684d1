"""The draft's parameters and its pool, and the calls of its programs."""

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
        """See `KVPool`."""
        keys, states = self._pools
        return keys.take(), states.take()

    def put(self, arrays: HeadPool) -> None:
        """See `KVPool`."""
        for pool, array in zip(self._pools, arrays, strict=True):
            pool.put(array)

    def release(self) -> None:
        """See `KVPool`."""
        for pool in self._pools:
            pool.release()


class Drafter:
    """Owns the draft's parameters and its pool, which has the blocks of the model's.

    Blocks that leave for the host and come back are not moved here: what the draft's pool has of them then is
    another's, until it is shown their tokens.

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
        """Starts the draft over tokens that it has not seen."""
        program = self._programs.find(ProgramSpec("draft", packed.num_tokens))
        self._pool.put(program(self._params, self._pool.take(), packed.words))

    def forward(self, packed: PackedForward) -> jax.Array:
        """Starts the model over a step's tokens, as `StepRunner.forward`."""
        return self._runner.forward(packed)

    def catch_up(self) -> None:
        """Starts what is left to do behind the last forward: nothing."""

    def move(self, moves: BlockMoves) -> None:
        """Starts copies of blocks; other moves are the model's alone."""
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
        """Starts rounds of proposals; the outputs as one array, on their way to the host."""
        self.catch_up()
        num_rows = len(sampling.rows_r)
        program = self._programs.find(ProgramSpec("speculate", num_rows))
        words = self._packings[num_rows].pack(inputs, sampling, ending_token_ids_rx, num_left_r, num_rounds)
        return self._runner.speculate(program, words, self._params, self._pool)

    def release(self) -> None:
        """Frees the pool, and lets go of the parameters. Idempotent."""
        self._pool.release()
        self._params = {}


class HeadDrafter(Drafter):
    """A head's, which runs behind each forward of the model, but also behind the sample: a token does not wait for it.

        forward n | sample n | draft n | forward n + 1 | ...

    Blocks that came back from the host have none of its keys.
    """

    _due: tuple[PackedForward, jax.Array, list[jax.Array]] | None = None

    def show(self, packed: PackedForward) -> None:
        """Cannot be: there are no states of tokens that the model runs no more.

        Raises:
            InternalError: always.
        """
        raise InternalError(f"a head is shown {packed.num_tokens} tokens without their states")

    def forward(self, packed: PackedForward) -> jax.Array:
        """See `Drafter`."""
        self.catch_up()
        last_tokens = self._runner.last_tokens
        hidden_se = self._runner.forward(packed)
        self._due = packed, last_tokens, self._runner.take_features()
        return hidden_se

    def catch_up(self) -> None:
        """Starts the head behind the last forward, where it has not been."""
        if self._due is None:
            return
        (packed, last_tokens, features), self._due = self._due, None
        program = self._programs.find(ProgramSpec("draft", packed.num_tokens))
        self._pool.put(program(self._params, self._pool.take(), last_tokens, packed.words, *features))

    def release(self) -> None:
        """See `Drafter`."""
        self._due = None
        super().release()


def drafter_of(
    step: Step, geometry: Geometry, params: Params, runner: StepRunner, programs: ProgramStore
) -> Drafter | None:
    """The drafter of a step, with a pool of its own; None where it has no draft."""
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
