"""`python -m tests.multiprocess.planted serve ...` is `jpaged serve ...` with something wrong, named by PLANTED.

token     from its thirtieth step on the host of this process sees other tokens than were sampled
step      then its next step raises
version   it says that it is another version
"""

from __future__ import annotations

import dataclasses
import os
import sys

import jax

from jpaged.cli.main import main
from jpaged.device.executor import JaxExecutor
from jpaged.device.model_runner import PackedForward
from jpaged.device.multihost import handshake
from jpaged.engine.executor import StepInputs, StepOutputs

NUM_GOOD = 30
"""Steps before the fault."""


class Planted(JaxExecutor):
    """Right at first."""

    num_steps = 0

    def forward(self, inputs: StepInputs | PackedForward) -> jax.Array:
        self.num_steps += 1
        if os.environ["PLANTED"] == "step" and self.num_steps > NUM_GOOD:
            raise RuntimeError("a fault was planted here")
        return super().forward(inputs)

    def collect(self, handle: jax.Array | tuple[jax.Array, ...]) -> StepOutputs:
        outputs = super().collect(handle)
        if os.environ["PLANTED"] == "token" and self.num_steps > NUM_GOOD:
            return dataclasses.replace(outputs, token_ids_rn=outputs.token_ids_rn ^ 1)
        return outputs


if __name__ == "__main__":
    from jpaged import build

    vars(build)["JaxExecutor"] = Planted
    if os.environ["PLANTED"] == "version":
        vars(handshake)["__version__"] = "0.0.0"
    sys.exit(main())
