"""Plants faults into the engine, its disk, KV events, servers and kernels, and sees that their quick tests turn red.

python -m tests.mutation.plant [engine | blocks | events | roles | gpu | triton | product] [--table FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

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

_BEGIN, _END = "<!-- faults: begin -->", "<!-- faults: end -->"
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
        sources="jpaged/kernels/matmul/triton",
        tests="tests/kernels",
        left_out=(),
        words=lambda fault: ["tests/kernels/matmul/test_product_triton.py", "-k", " or ".join(fault.tests)],
        faults=PRODUCT_FAULTS,
    ),
}


def main() -> int:
    """Plant the faults of one bed, or of all; return 1 if one was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.plant")
    parser.add_argument("bed", nargs="?", choices=list(BEDS), help="part to plant faults into (default: all)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="page whose table gets the outcomes")
    arguments = parser.parse_args()
    rows, num_missed = [], 0
    for name, bed in BEDS.items():
        if arguments.bed in (None, name):
            try:
                rows += bed.plant_all(name, bed.faults)
            except AssertionError as error:
                print(f"error: {error}", file=sys.stderr)
                num_missed += 1
    if arguments.table is not None and not num_missed:
        head = ["| part | fault | file | first test that fails |", "|---|---|---|---|"]
        page = arguments.table.read_text()
        begin, end = page.index(_BEGIN) + len(_BEGIN), page.index(_END)
        arguments.table.write_text(page[:begin] + "\n".join(["", *head, *rows, ""]) + page[end:])
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
