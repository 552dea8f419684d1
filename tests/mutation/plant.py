"""Plants faults into the engine, and sees that its quick tests turn red.

python -m tests.mutation.plant
"""

from __future__ import annotations

import sys

from tests.mutation.memory_faults import MEMORY_FAULTS
from tests.mutation.planting import Bed, Fault
from tests.mutation.policy_faults import POLICY_FAULTS

FAULTS = (*MEMORY_FAULTS, *POLICY_FAULTS)

NO_FAULT = Fault(
    "nothing is planted",
    "kv/blocks.py",
    "class BlockPool:",
    "class BlockPool:",
    tuple(sorted({name for fault in FAULTS for name in fault.tests})),
)

BED = Bed(
    sources="jpaged/engine",
    tests="tests/engine",
    left_out=("device", "models", "kernels"),
    words=lambda fault: [f"tests/engine/{name}" for name in fault.tests],
)


if __name__ == "__main__":
    sys.exit(BED.plant_all(FAULTS))
