"""Whether what a compiler made of a case is as it should be."""

from __future__ import annotations

import re
from typing import Any


def kernels(output: str) -> dict[str, Any]:
    """Registers, spills, products and copies of our kernels, out of what compilers and the assembler printed."""
    return {
        "kernels": output.count("Compiling entry function"),
        "spilled_bytes": sum(int(n) for n in re.findall(r"(\d+) bytes spill", output)),
        "registers": [int(n) for n in re.findall(r"Used (\d+) registers", output)],
        "tensor_core_products": len(re.findall(r"wgmma\.mma_async|\bmma\.sync|tcgen05\.mma", output)),
        "bulk_copies": len(re.findall(r"cp\.async\.(?:bulk\.(?:tensor|global)|c[ag]\.)", output)),
    }


def judge(found: dict[str, Any], expected_error: str) -> list[str]:
    """The promises that are broken; `found` is what `compile_case` printed, and `kernels` with it."""
    if "error" in found:
        return [] if expected_error and expected_error in found["error"] else [found["error"][-2000:]]
    failures, limits = [], found["limits"]
    if expected_error:
        failures.append(f"it compiled, and should have been refused with {expected_error!r}")
    if found["alias_bytes"] < limits["pool_bytes"]:
        failures.append(f"the pool of {limits['pool_bytes']} bytes is not updated in place: {found['alias_bytes']}")
    if found["temp_bytes"] > limits["max_temp_bytes"]:
        failures.append(f"{found['temp_bytes']} bytes of working memory; the limit is {limits['max_temp_bytes']}")
    if found["host_waits"]:
        failures.append(f"the host would wait for the device: {', '.join(found['host_waits'])}")
    if found["big_copies"]:
        failures.append(f"copies of the pool or of weights: {', '.join(found['big_copies'])}")
    if found["pool_writes"] > limits["num_writes"]:
        failures.append(f"{found['pool_writes']} writes of the pool; {limits['num_writes']} are enough")
    for name, least in limits["calls"].items():
        if found["calls"].get(name, 0) < least:
            failures.append(f"{least} calls of {name} were to be there: there are {found['calls']}")
    if found["kernels"] < limits["num_kernels"]:
        failures.append(f"{found['kernels']} kernels; {limits['num_kernels']} were to be there")
    if limits["num_kernels"] and not (found["tensor_core_products"] and found["bulk_copies"]):
        failures.append("a kernel without products of the tensor core, or without copies that it need not wait for")
    if found["spilled_bytes"]:
        failures.append(f"{found['spilled_bytes']} bytes of registers are spilled")
    return failures
