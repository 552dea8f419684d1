"""Reads what the assembler made of our kernels: instructions, those of the loop over keys, and what fits a processor.

The text is what Mosaic prints while it compiles: PTX, the assembler's report, and SASS as nvdisasm writes it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

_REGISTERS = 65_536
"""A Hopper multiprocessor has so many."""
_SHARED_BYTES = 233_472
_RESERVED_BYTES = 1024
"""The system takes so much of the shared memory for each block of threads."""

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)(.*)")
_PRODUCT = re.compile(r"[HQI]GMMA\.(\d+)x(\d+)x(\d+)")
_OFFSET = re.compile(r"\+(0x[0-9a-f]+)\]")
_LABEL = re.compile(r"^(\.L_\w+):")


def kernels(output: str) -> list[dict[str, Any]]:
    """Our kernels in the order in which they were compiled; nothing where nvdisasm was not found.

    Returns:
        for each one: registers of a thread; threads and shared_bytes of a block; blocks_per_processor, as many as
        registers and shared memory let run at a time; instructions and tensor_products of the whole, and
        local_accesses, which are registers spilled to memory; loop_instructions of the smallest loop that multiplies
        on the tensor core, its products counted as so many of 64 x 64 x 16, and the conversions between types,
        powers, accesses to shared memory and barriers among them.
    """
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", output)]
    threads = [int(n) for n in re.findall(r"\.(?:req|max)ntid (\d+)", output)]
    found = [_kernel(lines) for lines in _functions(output)]
    for kernel, num_registers, num_threads in zip(found, registers, threads, strict=False):
        by_registers = _REGISTERS // (-(-num_registers // 8) * 8 * num_threads)
        by_shared = _SHARED_BYTES // (kernel["shared_bytes"] + _RESERVED_BYTES)
        kernel |= {
            "registers": num_registers,
            "threads": num_threads,
            "blocks_per_processor": min(by_registers, by_shared),
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
    products = [address for address, operation, _ in code if _PRODUCT.match(operation)]
    loops = []
    for address, operation, operands in code:
        target = re.search(r"`\((\.L_\w+)\)", operands)
        begin = labels.get(target[1], address) if target and operation.startswith("BRA") else address
        if any(begin <= product < address for product in products):
            loops.append((address - begin, begin, address))
    _, begin, end = min(loops, default=(0, 0, 0))
    counts = Counter(operation.split(".")[0] for address, operation, _ in code if begin <= address < end)
    everywhere = Counter(operation.split(".")[0] for _, operation, _ in code)
    barriers = [int(n, 16) for _, name, rest in code if name.startswith("SYNCS") for n in _OFFSET.findall(rest)]
    return {
        "instructions": sum(everywhere.values()) - everywhere["NOP"],
        "tensor_products": len(products),
        "local_accesses": everywhere["LDL"] + everywhere["STL"],
        "shared_bytes": max(barriers, default=-8) + 8,
        "loop_instructions": sum(counts.values()),
        "loop_products": sum(_work(operation) for address, operation, _ in code if begin <= address < end),
        "loop_conversions": counts["F2F"] + counts["F2FP"] + counts["I2F"] + counts["I2FP"],
        "loop_powers": counts["MUFU"],
        "loop_shared_accesses": counts["LDS"] + counts["STS"] + counts["LDSM"] + counts["STSM"],
        "loop_barriers": counts["BAR"] + counts["SYNCS"],
    }


def _work(operation: str) -> int:
    match = _PRODUCT.match(operation)
    return math.prod(int(n) for n in match.groups()) // (64 * 64 * 16) if match else 0
