"""What each part of a kernel's program does, told by its instructions and not by its place."""

from __future__ import annotations

from typing import Literal

from benchmarks.tpu_cycles.program import Block, Program

Region = Literal["compute", "issue", "wait", "other"]


def regions(program: Program) -> list[Region]:
    """For each block: a product makes it compute, a DMA's start issue, a wait for one wait.

    A block with none of them belongs to the innermost loop that has one. What is in no such loop is other.
    """
    own = [_own(program, block) for block in program.blocks]
    loops = [(block.jump.target, block.end) for block in program.blocks if block.jump and block.jump.target < block.end]
    loops.sort(key=lambda loop: loop[1] - loop[0])
    found: list[Region] = []
    for block, region in zip(program.blocks, own, strict=True):
        around = [loop for loop in loops if loop[0] <= block.begin and block.end <= loop[1]]
        found.append(region if region != "other" or not around else _of_loop(program, own, around[0]))
    return found


def _own(program: Program, block: Block) -> Region:
    if any(program.uses_matrix_units[block.begin : block.end]):
        return "compute"
    names = {one.name for bundle in program.bundles[block.begin : block.end] for one in bundle}
    dmas = {name for name in names if name.startswith("dma.")}
    if any(not name.startswith("dma.done") for name in dmas):
        return "issue"
    return "wait" if dmas else "other"


def _of_loop(program: Program, own: list[Region], loop: tuple[int, int]) -> Region:
    within = {
        region
        for block, region in zip(program.blocks, own, strict=True)
        if loop[0] <= block.begin and block.end <= loop[1]
    }
    # Control around a product's loop is the row's: it has nothing to do with what the products take.
    return next((region for region in ("issue", "wait") if within <= {region, "other"} and region in within), "other")
