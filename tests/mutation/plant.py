"""Plants faults into the engine, its disk, KV events, servers and kernels, and sees that their tests turn red.

python -m tests.mutation.plant [engine | blocks | events | roles | gpu | triton | product]
python -m tests.mutation.plant --table
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
from tests.mutation.planting import ROOT, Bed
from tests.mutation.policy_faults import POLICY_FAULTS
from tests.mutation.product_faults import PRODUCT_FAULTS
from tests.mutation.role_faults import ROLE_FAULTS
from tests.mutation.tier_faults import STORE_FAULTS, TIER_FAULTS
from tests.mutation.travel_faults import TRAVEL_FAULTS
from tests.mutation.triton_faults import TRITON_FAULTS

PAGE = ROOT / "docs/planted_faults.md"
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
        suite="long",  # interpreted kernels take seconds a case
    ),
    "triton": Bed(
        sources=f"{_ATTENTION}/triton",
        tests="tests/kernels",
        left_out=(),
        words=lambda fault: ["tests/kernels/triton", "-k", " or ".join(f"({name})" for name in fault.tests)],
        faults=TRITON_FAULTS,
        suite="long",  # interpreted kernels take seconds a case
    ),
    "product": Bed(
        sources="jpaged/kernels/matmul/triton",
        tests="tests/kernels",
        left_out=(),
        words=lambda fault: ["tests/kernels/matmul/test_product_triton.py", "-k", " or ".join(fault.tests)],
        faults=PRODUCT_FAULTS,
    ),
}


def table() -> str:
    """Return the rows of all faults, with the tests that must notice each, in Markdown."""
    head = ["| part | fault | file | tests that must fail | suite |", "|---|---|---|---|---|"]
    rows = [
        f"| {name} | {fault.name} | `{fault.path}` | {', '.join(f'`{test}`' for test in fault.tests)} | {bed.suite} |"
        for name, bed in BEDS.items()
        for fault in bed.faults
    ]
    return "\n".join(["", *head, *rows, ""])


def with_table(page: str) -> str:
    """Return the text of a page with its table replaced by the one of today's faults."""
    begin, end = page.index(_BEGIN) + len(_BEGIN), page.index(_END)
    return page[:begin] + table() + page[end:]


def main() -> int:
    """Plant the faults of one bed, or of all; return 1 if one was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.plant")
    parser.add_argument("bed", nargs="?", choices=list(BEDS), help="part to plant faults into (default: all)")
    parser.add_argument("--table", action="store_true", help="only write the table of docs/planted_faults.md")
    arguments = parser.parse_args()
    if arguments.table:
        PAGE.write_text(with_table(PAGE.read_text()))
        return 0
    beds = [BEDS[arguments.bed]] if arguments.bed else BEDS.values()
    return max([bed.plant_all(bed.faults) for bed in beds])


if __name__ == "__main__":
    sys.exit(main())
