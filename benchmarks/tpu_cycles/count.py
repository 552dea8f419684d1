"""Compiles cases for TPUs that are not here and counts their cycles: a process of its own, which libtpu may abort.

    TPU_LIBRARY_PATH=... python -m benchmarks.tpu_cycles.count FOLDER CASE...

libtpu writes its programs into the folder, which the caller makes and removes; each is read and removed at once.
Prints a line of JSON a case.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.tpu_cycles import experts
from benchmarks.tpu_cycles.cases import CONTEXT, MAX_CONTEXT, NUM_ROWS, TOPOLOGIES, Case, flops_per_cycle, memory
from benchmarks.tpu_cycles.counting import MARK
from benchmarks.tpu_cycles.experts import ExpertsCase
from benchmarks.tpu_cycles.machine import LostTrack, Machine, Memory, Run
from benchmarks.tpu_cycles.operands import KernelCall, kernel_calls
from benchmarks.tpu_cycles.program import Program, read
from benchmarks.tpu_cycles.regions import regions
from jpaged import json_text
from jpaged.device.aot.topology import compile_only_devices, find_topology
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.paged_attention import AttentionSpec, RaggedRows, paged_attention_update

_MIB = 1 << 20
_FEW_ROWS = 8


@dataclass(frozen=True, slots=True)
class Load:
    """What a step is made of: rows with so many new tokens each, behind which their contexts end."""

    num_rows: int
    num_new: int
    context: int


@dataclass(frozen=True, slots=True)
class Total:
    """The cycles of one run of a kernel, on the core that takes longest.

    Attributes:
        compute: of products and what surrounds them.
        issue: of starting to fetch blocks.
        wait: of the instructions that wait for them.
        other: all others.
        elapsed: all, and what the memory is behind.
        pool_bytes: that were fetched.
        num_fetches: DMAs that fetched them.
        num_turns: chunks that were waited for and multiplied.
    """

    compute: float
    issue: float
    wait: float
    other: float
    elapsed: float
    pool_bytes: int
    num_fetches: int
    num_turns: int

    @property
    def cycles(self) -> float:
        return self.compute + self.issue + self.wait + self.other


def count(case: Case, folder: Path) -> dict[str, Any]:
    """The cycles of a case, compiled now; the folder is empty before and behind.

    Raises:
        UnreadableProgram: libtpu wrote what is not understood.
        LostTrack: the program cannot be followed, or fetches other blocks than the rows'.
    """
    mesh = Mesh(np.array(compile_only_devices(find_topology(TOPOLOGIES[case.generation]))[:1]), ("x",))
    spec, whole = AttentionSpec(case.layout, AttentionKind(case.head_dim**-0.5)), PartitionSpec()

    def step(q: Any, new_kv: Any, pool: Any, layer: Any, rows: Any, scales: Any) -> Any:
        return paged_attention_update(q, new_kv, pool, layer, rows, spec, scales, backend="pallas-tpu")

    sharded = jax.shard_map(step, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    first = _arguments(case, Load(1, 1, CONTEXT))
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, whole)), first)
    jax.jit(sharded, donate_argnums=2).lower(*avals).compile()

    name = f"paged_attention_{'decode' if case.kind == 'decode' else 'chunks'}"
    program = read(folder, name)
    for path in folder.iterdir():
        path.unlink()

    called = kernel_calls(sharded, avals)

    def run(load: Load) -> Total:
        calls = [call for call in called(_arguments(case, load)) if call.name.startswith(name)]
        if len(calls) != 1:
            raise LostTrack(f"{case}: {len(calls)} kernels are called {name}")
        return _total(case, program, calls[0], load)

    counted = _decode(case, run) if case.kind == "decode" else _prefill(case, run)
    found = {"num_bundles": len(program.bundles), "num_fills": program.num_fills, "num_spills": program.num_spills}
    return {"case": str(case), **dataclasses.asdict(case), **counted, **found}


def _decode(case: Case, run: Any) -> dict[str, float]:
    """A step, and how its cycles grow with the context: what is left at none is each row's."""
    whole = run(Load(NUM_ROWS, 1, CONTEXT))
    short, long = run(Load(_FEW_ROWS, 1, CONTEXT)), run(Load(_FEW_ROWS, 1, MAX_CONTEXT))
    more_bytes, more_fetches = long.pool_bytes - short.pool_bytes, long.num_fetches - short.num_fetches
    more_turns = long.num_turns - short.num_turns
    if min(more_bytes, more_fetches, more_turns) <= 0:
        raise LostTrack(f"{case}: a longer context has no more bytes, fetches or chunks: {short} and {long}")
    compute = long.compute + long.other - short.compute - short.other
    issue, wait = long.issue - short.issue, long.wait - short.wait
    more_tokens = _FEW_ROWS * (MAX_CONTEXT - CONTEXT)
    memory_cycles = whole.pool_bytes / memory(case.generation).bytes_per_cycle
    return {
        "chunk_bytes": more_bytes // more_turns,
        "compute_per_mib": round(compute * _MIB / more_bytes, 1),
        "issue_per_block": round(issue / (more_bytes / case.block_bytes), 2),
        "wait_per_chunk": round(wait / more_turns, 2),
        "per_row": round(whole.cycles / NUM_ROWS - (compute + issue + wait) / more_tokens * CONTEXT, 1),
        "cycles_per_mib": round(whole.cycles * _MIB / whole.pool_bytes, 1),
        "memory_per_mib": round(memory_cycles * _MIB / whole.pool_bytes, 1),
        "share": round(memory_cycles / whole.elapsed, 4),
    }


def _prefill(case: Case, run: Any) -> dict[str, float]:
    """A prompt's chunk behind others: what keys cost that all queries see, and what it costs as a prompt by itself."""
    alone, behind = run(Load(1, CONTEXT, CONTEXT)), run(Load(1, CONTEXT, 2 * CONTEXT))
    last = run(Load(1, CONTEXT, 4 * CONTEXT))
    num_heads = case.num_kv_heads * case.group
    tiles = (CONTEXT / 256) * (2 * CONTEXT / 256) * num_heads
    per_tile = (last.cycles - behind.cycles) / tiles
    peak = flops_per_cycle(case.generation)
    return {
        "per_256x256_head": round(per_tile, 1),
        "flops_per_cycle": round(4 * 256 * 256 * case.head_dim / per_tile, 1),
        "peak_share": round(4 * 256 * 256 * case.head_dim / per_tile / peak, 4),
        "prompt_cycles": round(alone.cycles),
        "stalled_share": round(1 - last.cycles / last.elapsed, 4),
    }


def _arguments(case: Case, load: Load) -> tuple[Any, ...]:
    """One step's arguments: blocks anywhere in the pool, whose content does not matter."""
    layout, rng = case.layout, np.random.default_rng(0)
    num_tokens, num_rows, block_size = case.num_tokens, case.num_rows, case.block_size
    heads = case.num_kv_heads * case.group
    tables = rng.integers(1, layout.num_blocks + 1, (num_rows, MAX_CONTEXT // block_size), dtype=np.int32)
    is_used = np.arange(num_rows) < load.num_rows
    starts = np.minimum(np.arange(num_rows + 1), load.num_rows) * load.num_new
    row = np.minimum(np.arange(num_tokens) // load.num_new, num_rows - 1)
    position = load.context - load.num_new + np.arange(num_tokens) % load.num_new
    slots = tables[row, position // block_size] * block_size + position % block_size
    slots = np.where(np.arange(num_tokens) < starts[-1], slots, layout.blocks_per_layer * block_size)
    new = np.zeros((num_tokens, case.num_kv_heads, case.head_dim), jnp.bfloat16)
    context_lens = np.where(is_used, load.context, 0).astype(np.int32)
    rows: list[Any] = [starts.astype(np.int32), context_lens, tables, np.int32(load.num_rows)]  # of the host
    return (
        np.zeros((num_tokens, heads, case.head_dim), jnp.bfloat16),
        (new, new, slots.astype(np.int32)),
        np.zeros(layout.shape, layout.storage_dtype),
        np.int32(0),
        RaggedRows(*rows),
        np.ones((layout.num_layers, case.num_kv_heads, 2), np.float32) if layout.is_scaled else None,
    )


def _total(case: Case, program: Program, call: KernelCall, load: Load) -> Total:
    """A run on every core that the program asks about."""
    pool = [i for i, shape in enumerate(call.shapes) if shape == case.layout.shape]
    whole = memory(case.generation)
    if len(pool) != 1:
        raise LostTrack(f"{case}: {len(pool)} operands of {call.name} have the pool's shape {case.layout.shape}")

    def runs(speed: Memory, cores: Sequence[int]) -> list[Run]:
        return [Machine(program, call.operands, pool[0], speed, core).run() for core in cores]

    found = runs(whole, (0, 1) if program.core_place else (0,))
    if all(run.pool_bytes for run in found) and len(found) > 1:
        found = runs(dataclasses.replace(whole, bytes_per_cycle=whole.bytes_per_cycle / len(found)), range(len(found)))
    fetched = sum(run.pool_bytes for run in found)
    blocks = load.num_rows * -(-load.context // case.block_size)
    if case.kind == "decode" and fetched != blocks * case.block_bytes:
        raise LostTrack(f"{case}: {fetched} bytes were fetched, where {blocks} blocks have {blocks * case.block_bytes}")
    slowest = max(found, key=lambda run: run.num_cycles)
    sums = dict.fromkeys(("compute", "issue", "wait", "other"), 0.0)
    for region, block, times in zip(regions(program), program.blocks, slowest.counts, strict=True):
        sums[region] += times * (block.end - block.begin)
    num_fetches, num_turns = sum(run.num_fetches for run in found), sum(run.num_turns for run in found)
    return Total(**sums, elapsed=slowest.num_cycles, pool_bytes=fetched, num_fetches=num_fetches, num_turns=num_turns)


def main(folder: Path, cases: Sequence[str]) -> None:
    for case in cases:
        is_of_experts = f"/{experts.KIND}/" in case
        counted = experts.count(ExpertsCase.parse(case), folder) if is_of_experts else count(Case.parse(case), folder)
        print(MARK + json_text.dumps(counted), flush=True)


if __name__ == "__main__":
    if "xla_jf_dump_to" not in os.environ.get("LIBTPU_INIT_ARGS", ""):
        sys.exit("LIBTPU_INIT_ARGS has no --xla_jf_dump_to: run python -m benchmarks.tpu_cycles, which starts this")
    main(Path(sys.argv[1]), sys.argv[2:])
