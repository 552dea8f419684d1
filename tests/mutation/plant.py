"""Plants faults into the engine, its disk, KV events, servers and kernels, and sees that their quick tests turn red.

python -m tests.mutation.plant [engine | blocks | events | roles | gpu | triton | product]
"""

from __future__ import annotations

import argparse
import sys

from tests.mutation.adapter_faults import ADAPTER_FAULTS, FEED_FAULTS
from tests.mutation.draft_faults import DRAFT_FAULTS
from tests.mutation.event_faults import CHANGE_FAULTS, EVENT_FAULTS
from tests.mutation.eviction_faults import EVICTION_FAULTS
from tests.mutation.gpu_faults import GPU_FAULTS
from tests.mutation.memory_faults import MEMORY_FAULTS
from tests.mutation.planting import Bed
from tests.mutation.policy_faults import POLICY_FAULTS
from tests.mutation.product_faults import PRODUCT_FAULTS
from tests.mutation.role_faults import ROLE_FAULTS
from tests.mutation.tier_faults import STORE_FAULTS, TIER_FAULTS
from tests.mutation.travel_faults import TRAVEL_FAULTS
from tests.mutation.triton_faults import TRITON_FAULTS

_ATTENTION = "jpaged/kernels/paged_attention"

BEDS = {
    "engine": Bed(
        sources="jpaged/engine",
        tests="tests/engine",
        left_out=("device", "models", "kernels"),
        words=lambda fault: [f"tests/engine/{name}" for name in fault.tests],
        faults=(
            *MEMORY_FAULTS,
            *EVICTION_FAULTS,
            *POLICY_FAULTS,
            *DRAFT_FAULTS,
            *FEED_FAULTS,
            *ADAPTER_FAULTS,
            *TRAVEL_FAULTS,
            *TIER_FAULTS,
            *CHANGE_FAULTS,
        ),
    ),
    "blocks": Bed(
        sources="jpaged/blockstore",
        tests="tests/blockstore",
        left_out=("device", "models", "kernels"),
        words=lambda fault: [f"tests/blockstore/{name}" for name in fault.tests],
        faults=STORE_FAULTS,
    ),
    "events": Bed(
        sources="jpaged/kvevents",
        tests="tests/kvevents",
        left_out=("device", "models", "kernels"),
        words=lambda fault: [f"tests/kvevents/{name}" for name in fault.tests],
        faults=EVENT_FAULTS,
    ),
    "roles": Bed(
        sources="jpaged",
        tests="tests",
        left_out=("device", "models", "kernels", "parity", "e2e"),
        words=lambda fault: [f"tests/server/{name}" for name in fault.tests],
        faults=ROLE_FAULTS,
    ),
    "gpu": Bed(
        sources=f"{_ATTENTION}/gpu",
        tests="tests/kernels",
        left_out=(),
        words=lambda fault: ["tests/kernels/test_paged_attention_gpu.py", "-k", " or ".join(fault.tests)],
        faults=GPU_FAULTS,
    ),
    "triton": Bed(
        sources=f"{_ATTENTION}/triton",
        tests="tests/kernels",
        left_out=(),
        words=lambda fault: ["tests/kernels/triton", "-k", " or ".join(f"({name})" for name in fault.tests)],
        faults=TRITON_FAULTS,
    ),
    "product": Bed(
        sources="jpaged/kernels/product/triton",
        tests="tests/kernels",
        left_out=(),
        words=lambda fault: ["tests/kernels/product/test_product_triton.py", "-k", " or ".join(fault.tests)],
        faults=PRODUCT_FAULTS,
    ),
}


def main() -> int:
    """Plants the faults of the bed that the command line names, or of all; 1 if one was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.plant")
    parser.add_argument("bed", nargs="?", choices=list(BEDS), help="all where none is named")
    name = parser.parse_args().bed
    return max([bed.plant_all(bed.faults) for bed in ([BEDS[name]] if name else BEDS.values())])


if __name__ == "__main__":
    sys.exit(main())
