"""The draft's parameters and its pool, and the calls of its programs."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax.sharding import NamedSharding

from jpaged.device.mesh import POOL_SPEC
from jpaged.device.programs.compile import ProgramSpec
from jpaged.device.programs.store import ProgramStore
from jpaged.device.speculation.packing import SpeculatePacking
from jpaged.device.step.forward import Step
from jpaged.device.step.runner import KVPool, PackedForward, StepRunner
from jpaged.device.transfers import copies_of
from jpaged.engine.executor import I32, BlockMoves, Geometry, Move, SamplingInputs, StepInputs
from jpaged.models.layers import Params


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
        pool: KVPool,
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

    def move(self, moves: BlockMoves) -> None:
        """Starts copies of blocks; other moves are the model's alone."""
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
        num_rows = len(sampling.rows_r)
        program = self._programs.find(ProgramSpec("speculate", num_rows))
        words = self._packings[num_rows].pack(inputs, sampling, ending_token_ids_rx, num_left_r, num_rounds)
        return self._runner.speculate(program, words, self._params, self._pool)

    def release(self) -> None:
        """Frees the pool, and lets go of the parameters. Idempotent."""
        self._pool.release()
        self._params = {}


def drafter_of(
    step: Step, geometry: Geometry, params: Params, runner: StepRunner, programs: ProgramStore
) -> Drafter | None:
    """The drafter of a step, with a pool of its own; None where it has no draft."""
    if step.draft is None:
        return None
    pool = KVPool(step.draft.step.layout, NamedSharding(step.mesh, POOL_SPEC))
    packings = {size: SpeculatePacking.of(size, geometry) for size in geometry.buckets.speculates}
    return Drafter(params, pool, packings, runner, programs)
