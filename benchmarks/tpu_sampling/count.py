"""Cycles of the sampling kernel of TPUs, off the program that libtpu compiled.

A group of rows takes the bundles of each loop times its turns. Searches end when they are done: their passes are
counted over random logits, normal and of deviation 3. Stalls and the memory are left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.tpu_cycles.program import Program, UnreadableProgram, read
from benchmarks.tpu_programs import library
from jpaged.device import sampling
from jpaged.device.aot.topology import compile_only_devices, compiler_environment, find_topology
from jpaged.device.sampling import SamplingVocabulary
from jpaged.engine.executor import BANNED_WIDTH, Detail
from jpaged.kernels.sampling import RowSampling, SampledTokens
from jpaged.kernels.sampling.tpu import kernel
from jpaged.kernels.sampling.tpu.sampling import TpuSampling, choose_plan

TOPOLOGIES = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "v5p": "v5p:1x1x1", "tpu7x": "tpu7x:1x1x1"}
KINDS = {
    "greedy": (False, None, None),
    "sampled": (True, None, None),
    "top-k": (True, 50, None),
    "top-p": (True, None, 0.9),
    "top-k and top-p": (True, 50, 0.9),
}
"""What the rows ask for: noise, a top_k, a top_p."""


@dataclass(frozen=True, slots=True)
class Loops:
    """Bundles of a turn of each of the kernel's loops, and of a group besides them."""

    scale: int
    largest: int
    count: int
    weigh: int
    share: int
    draw: int
    first: int
    besides: int
    besides_search: int

    @classmethod
    def of(cls, program: Program) -> Loops:
        """The loops in the order of the kernel's text.

        Raises:
            UnreadableProgram: the program has others.
        """
        ends = {
            block.jump.target: block.end
            for block in program.blocks
            if block.jump is not None and block.jump.target <= block.begin
        }
        spans = sorted(span for span in ends.items() if span[1] - span[0] < len(program.bundles) * 9 // 10)
        inner = [s for s in spans if not any(s[0] < o[0] and o[1] <= s[1] for o in spans)]
        outer = [s for s in spans if s not in inner]
        scale, *inner = inner
        bans, inner = inner[: kernel.ROWS], inner[kernel.ROWS :]
        if len(inner) != 8:
            raise UnreadableProgram(f"the sampler has {len(inner)} loops behind those that ban; 8 are known")
        lengths = [end - begin for begin, end in inner]
        largest, count_a, count_b, weigh, share_a, share_b, draw, first = lengths
        of_searches = [end - begin for begin, end in outer if end - begin < len(program.bundles) // 2]
        searches = sum(of_searches) - count_a - count_b - share_a - share_b
        in_loops = sum(lengths) + scale[1] - scale[0] + sum(end - begin for begin, end in bans) + searches
        return cls(
            scale=scale[1] - scale[0],
            largest=largest,
            count=max(count_a, count_b),
            weigh=weigh,
            share=max(share_a, share_b),
            draw=draw,
            first=first,
            besides=len(program.bundles) - in_loops,
            besides_search=searches // 4,
        )


def compiled(generation: str, num_rows: int, vocab_size: int, detail: Detail, folder: Path) -> tuple[Program, int]:
    """The kernel's program, and the bytes of the call's temporaries.

    A process of its own compiles it, since libtpu may abort it.

    Raises:
        FileNotFoundError: there is no libtpu.
        RuntimeError: it did not compile.
    """
    command = [sys.executable, "-m", "benchmarks.tpu_sampling", "--compile", generation, str(num_rows), str(vocab_size)]
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    environment = os.environ | compiler_environment(library()) | {"LIBTPU_INIT_ARGS": flags}
    ran = subprocess.run([*command, detail.name], env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(ran.stderr[-2000:])
    return read(folder, "sample"), int(ran.stdout.split()[-1])


def compile_here(generation: str, num_rows: int, vocab_size: int, detail: Detail) -> int:
    """Compiles the call for a device; the bytes of its temporaries."""
    devices = compile_only_devices(find_topology(TOPOLOGIES[generation]))
    mesh = Mesh(np.array(devices[:1]), ("x",))

    def array(shape: tuple[int, ...], dtype: str = "int32") -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, PartitionSpec()))

    of_rows, numbers = array((num_rows,)), array((num_rows,), "float32")
    how = RowSampling(
        temperature_r=numbers,
        top_k_r=of_rows,
        top_p_r=numbers,
        min_p_r=numbers,
        seeds_r2=array((num_rows, 2), "uint32"),
        sequence_indices_r=of_rows,
        positions_r=of_rows,
        is_padding_r=of_rows,
        banned_token_ids_rx=array((num_rows, BANNED_WIDTH)),
    )

    def sample(logits_rv: jax.Array, how: RowSampling) -> SampledTokens:
        return sampling.sample(logits_rv, how, SamplingVocabulary(vocab_size), detail, TpuSampling())

    whole = PartitionSpec()
    sharded = jax.shard_map(sample, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    program = jax.jit(sharded).lower(array((num_rows, vocab_size), "float32"), how).compile()
    memory = program.memory_analysis()
    return -1 if memory is None else memory.temp_size_in_bytes


def num_passes(vocab_size: int, top_k: int | None, top_p: float | None, seed: int = 0) -> tuple[int, int]:
    """Passes of a group's two searches over random logits."""
    x = (np.random.default_rng(seed).normal(size=(kernel.ROWS, vocab_size)) * 3).astype(np.float32)
    weights = np.exp(x - x.max(axis=1, keepdims=True))
    calls = [0, 0]

    def row(numbers: np.ndarray) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(numbers, jnp.float32)[:, None], (kernel.ROWS, kernel.LANES))

    def total(which: int, values: np.ndarray, thresholds: jax.Array) -> jax.Array:
        calls[which] += 1
        return row(np.where(x >= np.asarray(thresholds)[:, :1], values, 0).sum(axis=1))

    largest = row(x.max(axis=1))
    high = kernel.keys(largest) + 1
    floor = row(np.full(kernel.ROWS, -np.inf))
    with jax.disable_jit():
        if top_k is not None:
            slots = np.pad(x, ((0, 0), (0, -vocab_size % 1024)), constant_values=-np.inf).reshape(kernel.ROWS, -1, 1024)
            low = kernel.keys(row(slots.max(axis=1).min(axis=1)))
            count = np.ones_like(x)
            need = row(np.full(kernel.ROWS, top_k))
            floor = kernel.search(low, high, lambda at: total(0, count, at), need, lambda _, total, __: total == need)
        if top_p is not None:
            left = np.where(x >= np.asarray(floor)[:, :1], weights, 0)
            whole = row(left.sum(axis=1))
            low = kernel.keys(jnp.maximum(floor, largest - np.log(vocab_size / (1 - top_p)) - 1))
            kernel.search(
                low,
                high,
                lambda at: total(1, left, at),
                top_p * whole,
                lambda at, low, high: kernel.has_one_between(jnp.exp(at - largest), whole, low, high),
            )
    return calls[0], calls[1]


def cycles(loops: Loops, kind: str, num_rows: int, vocab_size: int) -> int:
    """Cycles of all groups."""
    is_sampled, top_k, top_p = KINDS[kind]
    plan = choose_plan(vocab_size, has_logprobs=False)
    if isinstance(plan, str):
        raise ValueError(plan)
    counted, shared = num_passes(vocab_size, top_k, top_p)
    turns, draws = 2 * plan.half_width // kernel.PASS, plan.half_width // kernel.DRAW
    of_group = loops.besides + draws * loops.scale + turns * loops.largest
    of_group += draws * (loops.draw if is_sampled else loops.first)
    of_group += counted * (turns * loops.count + loops.besides_search)
    if top_p is not None:
        of_group += 2 * draws * loops.weigh + shared * (turns * loops.share + loops.besides_search)
    return of_group * -(-num_rows // kernel.ROWS)
