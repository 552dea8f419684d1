"""Reads what the assembler made of our kernels: instructions, those of the loop over keys, and what fits a processor.

The text is what Mosaic prints while it compiles, or `assembler.py` finds for Triton's kernels: PTX, the assembler's
report, and SASS as nvdisasm writes it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

from jpaged.device.aot.topology import description

_RESERVED_BYTES = 1024
"""The system takes so much of the shared memory for each block of threads."""

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)(.*)")
_GROUP_PRODUCT = re.compile(r"[HQI]GMMA\.(\d+)x(\d+)x(\d+)")
"""By four warps together, since Hopper; only there are the sizes separated."""
_WARP_PRODUCT = re.compile(r"[HQI]MMA\.(16)(8)(\d+)\.")
"""By one warp alone."""
_UNIT_PRODUCT = re.compile(r"UTC[HQIO]MMA")
"""By a Blackwell processor's unit, whose sizes the instruction does not name."""
_OFFSET = re.compile(r"\+(0x[0-9a-f]+)\]")
_LABEL = re.compile(r"^(\.L_\w+):")


def kernels(output: str, gpu: str = "h200") -> list[dict[str, Any]]:
    """Our kernels in the order in which they were compiled, or of their names; nothing where nvdisasm was not found.

    Args:
        output: what compilers and the assembler printed.
        gpu: which it is for, one of `jpaged.device.aot.topology.GPUS`.

    Returns:
        for each one: registers of a thread; threads and shared_bytes of a block; blocks_per_processor, as many as
        registers, threads and shared memory let run at a time; instructions and tensor_products of the whole, and
        local_accesses, which are registers spilled to memory; loops, the smallest ones that multiply on the tensor
        core, that with the fewest instructions a product first: on Hopper chunks that all queries see run in it, and
        only those at their ends in others. For each one: instructions; products, counted as so many of 64 x 64 x 16
        by four warps (those of a Blackwell processor's unit as one each); and conversions between types, powers,
        accesses to shared memory and barriers among the instructions.
    """
    limits = {name: int(number) for name, number in re.findall(r"(\w+_per_core\w*): (\d+)", description(gpu))}
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", output)]
    threads = [int(n) for n in re.findall(r"\.(?:req|max)ntid (\d+)", output)]
    launched = [int(n) for n in re.findall(r"shared_memory: (\d+) bytes", output)]
    found = [_kernel(lines) for lines in _functions(output)]
    for number, (kernel, num_registers, num_threads) in enumerate(zip(found, registers, threads, strict=False)):
        if number < len(launched):
            kernel["shared_bytes"] = launched[number]
        by_registers = limits["registers_per_core_limit"] // (-(-num_registers // 8) * 8 * num_threads)
        by_shared = limits["shared_memory_per_core"] // (kernel["shared_bytes"] + _RESERVED_BYTES)
        kernel |= {
            "registers": num_registers,
            "threads": num_threads,
            "blocks_per_processor": min(by_registers, by_shared, limits["threads_per_core_limit"] // num_threads),
        }
    return found


_Line = tuple[int, str, str]
"""Address, operation with its modifiers, operands; a label has its name for an operation, and no operands."""


def _functions(output: str) -> list[list[_Line]]:
    functions: list[list[_Line]] = []
    labels: list[str] = []
    for line in output.splitlines():
        if match := _LABEL.match(line):
            labels.append(match[1])
        elif match := _INSTRUCTION.search(line):
            address = int(match[1], 16)
            if address == 0:
                functions.append([])
            functions[-1] += [(address, label, "") for label in labels]
            functions[-1].append((address, match[2], match[3]))
            labels = []
    return functions


def _kernel(lines: list[_Line]) -> dict[str, Any]:
    labels = {operation: address for address, operation, _ in lines if operation.startswith(".L_")}
    code = [line for line in lines if not line[1].startswith(".L_")]
    products = [address for address, operation, _ in code if _work(operation)]
    spans: list[tuple[int, int, int]] = []
    for address, operation, operands in code:
        target = re.search(r"`\((\.L_\w+)\)", operands)
        begin = labels.get(target[1], address) if target and operation.startswith("BRA") else address
        if any(begin <= product < address for product in products):
            spans.append((address - begin, begin, address))
    innermost: list[tuple[int, int]] = []
    for _, begin, end in sorted(spans):
        if all(end <= first or last <= begin for first, last in innermost):
            innermost.append((begin, end))
    loops = [_loop([operation for address, operation, _ in code if begin <= address < end]) for begin, end in innermost]
    everywhere = Counter(operation.split(".")[0] for _, operation, _ in code)
    barriers = [int(n, 16) for _, name, rest in code if name.startswith("SYNCS") for n in _OFFSET.findall(rest)]
    return {
        "instructions": sum(everywhere.values()) - everywhere["NOP"],
        "tensor_products": len(products),
        "local_accesses": everywhere["LDL"] + everywhere["STL"],
        "shared_bytes": max(barriers, default=-8) + 8,
        "loops": sorted(loops, key=lambda loop: loop["instructions"] / loop["products"]),
    }


def _loop(operations: list[str]) -> dict[str, Any]:
    counts = Counter(operation.split(".")[0] for operation in operations)
    return {
        "instructions": sum(counts.values()),
        "products": sum(_work(operation) for operation in operations),
        "conversions": counts["F2F"] + counts["F2FP"] + counts["I2F"] + counts["I2FP"],
        "powers": counts["MUFU"],
        "shared_accesses": counts["LDS"] + counts["STS"] + counts["LDSM"] + counts["STSM"],
        "barriers": counts["BAR"] + counts["SYNCS"],
    }


def _work(operation: str) -> float:
    """Products of 64 x 64 x 16 by four warps."""
    if match := _GROUP_PRODUCT.match(operation):
        return math.prod(int(n) for n in match.groups()) / (64 * 64 * 16)
    if match := _WARP_PRODUCT.match(operation):
        return 4 * math.prod(int(n) for n in match.groups()) / (64 * 64 * 16)
    return float(_UNIT_PRODUCT.match(operation) is not None)
