"""Runs the two programs of a step: packs what they take, finds the compiled one, keeps what stays on the device.

    forward   inputs, last tokens  ->  hidden states        the pool is updated in place
    sample    hidden states, rows  ->  outputs              the last tokens are replaced, the copy to the host begins

Nothing is traced here and nothing waits: the calls are of executables, with numpy buffers as they are.
"""

from __future__ import annotations

import jax
import numpy as np

from jpaged.device.kv_cache import KVPool
from jpaged.device.mesh import replicated
from jpaged.device.programs.compile import ProgramSpec
from jpaged.device.programs.store import ProgramStore
from jpaged.device.step.forward import Step, forward_packing
from jpaged.device.step.inputs import PackedForward
from jpaged.engine.executor import Geometry, SamplingInputs, StepInputs
from jpaged.models.layers import Params


class StepRunner:
    """Owns the parameters and the tokens that were sampled last. The pool is lent, for the time of a forward."""

    def __init__(self, step: Step, params: Params, geometry: Geometry, pool: KVPool, programs: ProgramStore) -> None:
        self._params = params
        self._head_params = {name: tree for name, tree in params.items() if name != "layers"}
        self._pool = pool
        self._programs = programs
        self._packings = {size: forward_packing(size, geometry) for size in geometry.buckets.tokens}
        self._last_tokens = jax.device_put(np.zeros(step.num_places, np.int32), replicated(step.mesh))

    def pack(self, inputs: StepInputs) -> PackedForward:
        """A step's inputs in a fresh buffer.

        Raises:
            InternalError: shapes of no compiled program.
        """
        num_tokens = len(inputs.token_ids_t)
        self._programs.find(ProgramSpec("forward", num_tokens))
        return PackedForward(num_tokens, self._packings[num_tokens].pack(inputs))

    def forward(self, packed: PackedForward) -> jax.Array:
        """Starts the model over a step's tokens; the hidden states from which its rows sample."""
        program = self._programs.find(ProgramSpec("forward", packed.num_tokens))
        pool, hidden_se = program(self._params, self._pool.take(), self._last_tokens, packed.words)
        self._pool.put(pool)
        return hidden_se

    def sample(self, hidden_se: jax.Array, inputs: SamplingInputs) -> jax.Array:
        """Starts sampling; the outputs as one array, on their way to the host."""
        program = self._find_sample(len(inputs.rows_r), inputs.want_top_logprobs)
        self._last_tokens, outputs_rc = program(self._head_params, hidden_se, inputs.words)
        outputs_rc.copy_to_host_async()
        return outputs_rc

    def release(self) -> None:
        """Lets go of the parameters. Idempotent."""
        self._params, self._head_params = {}, {}

    def _find_sample(self, num_rows: int, want_top_logprobs: bool) -> jax.stages.Compiled:
        plain = ProgramSpec("sample", num_rows)
        return self._programs.find(
            plain if not want_top_logprobs and plain in self._programs.ready else plain.with_top_logprobs()
        )
