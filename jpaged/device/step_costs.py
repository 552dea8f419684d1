"""Costs of steps on a device, as input for the scheduler's decisions.

Rates of the device are timed at startup, on idle blocks and on rows of the null block. The costs of reading a shared
prefix once (cascade attention) are constants of each backend:

    cpu   measured on one core, 1024 shared tokens: up to 4, 8, 16, 32 and 64 queries together cost 3.2, 4.0, 6.6, 12.5
          and 22 times one that reads alone (head size 32; 128 gains more: 2.1, 3.0 and 4.6), so 3.2 for every 8. Below
          a block or two the second call and the merging show: 16 tokens a query, 220 a step
    xla   measured on CPUs, in the same way: a tile of 8, 16 and 64 places costs 2.3, 3.0 and 6.8, whether or not every
          place has a query; merging costs about 16 tokens a query and 100 a step
    tpu   estimated: the chip's one core reads a prefix at the full rate for one row as for many, so a tile costs 1; two
          outputs of H heads are written, read and merged, 2.5 H / K tokens; starting a kernel takes some 5 us, in which
          800 GB/s read about 4 MB
    gpu   estimated: a tile has room for 64 query heads of a key/value head, in the Triton kernel for 32 (16 if they
          are wide). It costs the same as a row that decodes alone, which fills the tile less. On Hopper a query's
          second output is written in 32 bits, read and merged, 2 H / K tokens; the Triton kernel does so with both
          outputs, 4 H / K. No extra kernel is started, but more thread blocks: 0.3 us at 3.3 TB/s, or 0.5 us at 2 TB/s.
          The CUDA kernels have tiles of 16; both outputs are written in 16 bits, read and merged, 3 H / K, by four
          more kernels: 8 us

Layers with a sliding window have a third pass, over the tokens that only some queries see: at most a block or two.
Only the part of a prefix inside all windows is shared. The XLA loop does not share on GPUs: the number of runs would
have to reach the host for a decision in every layer of every step.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jpaged.config import Backend
from jpaged.device.compilation.program_registry import ProgramStore
from jpaged.device.model_runner import ModelRunner
from jpaged.device.transfers import BlockMover
from jpaged.engine.executor import MIN_BUCKET, BlockMoves, DeviceRates, Geometry, Move, SamplingInputs, StepInputs
from jpaged.engine.executor.io import CascadeCosts
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.api import IMPLEMENTATIONS
from jpaged.kernels.paged_attention.cuda import TILE_PAIRS
from jpaged.kernels.paged_attention.gpu.work import TILE_ROWS
from jpaged.kernels.paged_attention.reference import CHUNK_TOKENS, TILE_QUERIES
from jpaged.kernels.paged_attention.triton.work import get_group, shared_rows

_NUM_RUNS = 3
_ENOUGH_S = 0.015
"""Time after which no further run is made. The first-touch cost of memory is a small part of it."""
_CONTEXT_SHARE = 4
"""Context tokens per query token when attention is timed. A larger context would take too long on a slow device."""
_SIZE_FACTOR = 4
"""Ratio of the sizes that are timed if padding takes no time."""
NO_RATE = 1.0
"""The swap rate in bytes per second without host memory: recomputing is then always faster than swapping."""


def measure_rates(
    runner: ModelRunner,
    mover: BlockMover,
    programs: ProgramStore,
    geometry: Geometry,
    *,
    is_padding_free: bool = False,
) -> DeviceRates:
    """Time steps of the sizes compiled so far, and swaps of blocks that are not in use yet.

    Args:
        is_padding_free: the duration of a step depends on the tokens in use, not on the padded size.
    """

    def step_s(inputs: StepInputs) -> float:
        sampling = SamplingInputs.neutral(geometry.buckets.num_rows(inputs.num_rows))
        return _measure_seconds(lambda: np.asarray(runner.sample(runner.forward(runner.pack(inputs)), sampling)))

    sample_s: dict[int, float] = {}

    def split_step_s(inputs: StepInputs) -> float:
        """Time the forward, and the sample once: it takes as long after each, up to half of a step."""
        hidden: list[jax.Array] = []

        def forward() -> None:
            hidden[:] = [jax.block_until_ready(runner.forward(runner.pack(inputs)))]

        seconds, num_rows = _measure_seconds(forward), inputs.num_rows
        if num_rows not in sample_s:
            sampling = SamplingInputs.neutral(geometry.buckets.num_rows(num_rows))
            sample_s[num_rows] = _measure_seconds(lambda: np.asarray(runner.sample(hidden[0], sampling)))
        return seconds + sample_s[num_rows]

    if is_padding_free:
        forward_s, pair_s = measure_used_tokens(geometry, split_step_s)
    else:
        forward_s, pair_s = measure_steps(geometry, step_s)
    swap_out = swap_in = NO_RATE
    swap_sizes = programs.sizes(Move.SWAP_IN.value)
    if swap_sizes:
        count = min(geometry.num_host_blocks, geometry.num_blocks, swap_sizes[-1])
        ids = list(range(1, count + 1))

        def rate_of(move: Move) -> float:
            def swap() -> None:
                mover.run(BlockMoves(move, ids, ids), programs)
                mover.wait()

            return count * geometry.bytes_per_block / _measure_seconds(swap)

        swap_out, swap_in = rate_of(Move.SWAP_OUT), rate_of(Move.SWAP_IN)  # swaps existing contents
    return DeviceRates(swap_out, swap_in, forward_s, pair_s)


def measure_steps(
    geometry: Geometry, step_s: Callable[[StepInputs], float]
) -> tuple[tuple[tuple[int, float], ...], float]:
    """Measure `DeviceRates.forward_s` and `pair_s` with steps of the smallest, the middle and the largest size.

    Attention is timed in the middle size: once without a context, once with a long one.

    Args:
        step_s: runs a step and returns its seconds.
    """
    sizes = geometry.buckets.tokens
    middle = sizes[len(sizes) // 2]
    steps = {size: null_prefill(geometry, size) for size in sorted({sizes[0], middle, sizes[-1]})}
    timed = {size: step_s(inputs) for size, inputs in steps.items()}
    far = null_prefill(geometry, middle, min(_CONTEXT_SHARE * middle, geometry.max_model_len // 2))
    num_more = far.num_pairs - steps[middle].num_pairs
    pair_s = max(0.0, step_s(far) - timed[middle]) / num_more if num_more > 0 else 0.0
    # a larger value is noise
    pair_s = min(pair_s, *(timed[size] / 2 / inputs.num_pairs for size, inputs in steps.items()))
    return tuple((size, timed[size] - pair_s * inputs.num_pairs) for size, inputs in steps.items()), pair_s


def measure_used_tokens(
    geometry: Geometry, step_s: Callable[[StepInputs], float]
) -> tuple[tuple[tuple[int, float], ...], float]:
    """Measure as `measure_steps` if padding takes no time, in the largest program and without long steps.

    Sizes grow until a step takes `_ENOUGH_S`. Larger steps are extrapolated, as a start must not wait for the largest:
    on a CPU it takes seconds.

        timed        8 ── 32 ── 128          512 is on the line through the last two
    """
    largest = geometry.buckets.tokens[-1]
    timed: dict[int, float] = {}
    size = min(MIN_BUCKET, largest)
    while size not in timed:
        timed[size] = step_s(null_prefill(geometry, largest, num_tokens=size))
        if len(timed) == 1 or timed[size] < _ENOUGH_S:
            size = min(_SIZE_FACTOR * size, largest)
    start = min(_CONTEXT_SHARE * size, geometry.max_model_len // 2)
    near, far = (null_prefill(geometry, largest, begin, num_tokens=size) for begin in (0, start))
    num_more = far.num_pairs - near.num_pairs
    pair_s = max(0.0, step_s(far) - timed[size]) / num_more if num_more > 0 else 0.0
    pairs = {size: null_prefill(geometry, largest, num_tokens=size).num_pairs for size in timed}
    pair_s = min(pair_s, *(seconds / 2 / pairs[size] for size, seconds in timed.items()))
    points = [(size, seconds - pair_s * pairs[size]) for size, seconds in timed.items()]
    if size < largest:
        (small, small_s), (_, large_s) = points[-2:] if len(points) > 1 else ((0, 0.0), points[0])
        points.append((largest, large_s + max(0.0, large_s - small_s) / (size - small) * (largest - size)))
    return tuple(points), pair_s


def _measure_seconds(act: Callable[[], object]) -> float:
    """Return the fastest of up to `_NUM_RUNS` runs; a run that takes `_ENOUGH_S` is the last one.

    The first run also touches memory for the first time.
    Several processes make all runs: they wait for each other inside a step, and their clocks may differ.
    """
    quickest, start, is_alone = float("inf"), time.perf_counter(), jax.process_count() == 1
    for _ in range(_NUM_RUNS):
        begin = time.perf_counter()
        act()
        end = time.perf_counter()
        quickest = min(quickest, end - begin)
        if is_alone and end - start >= _ENOUGH_S:
            break
    return quickest


def null_prefill(geometry: Geometry, num_padded: int, start: int = 0, *, num_tokens: int | None = None) -> StepInputs:
    """Build a prefill step of a given size whose prompts use only the null block, so that it disturbs no cached block.

    Args:
        num_padded: one of the geometry's buckets.
        start: number of computed tokens of every prompt; below `max_model_len`.
        num_tokens: tokens in use, at most num_padded; None fills the step.
    """
    max_rows, row_len = geometry.max_num_seqs, geometry.max_model_len - start
    num_tokens = min(num_padded if num_tokens is None else num_tokens, max_rows * row_len)
    num_rows = -(-num_tokens // row_len)
    starts_s1 = np.minimum(np.arange(max_rows + 1) * row_len, num_tokens).astype(np.int32)
    positions_t = (start + np.arange(num_padded) % row_len).astype(np.int32)
    query_lens_s = np.diff(starts_s1)
    return StepInputs(
        token_ids_t=np.zeros(num_padded, np.int32),
        is_prev_sampled_t=np.zeros(num_padded, np.bool_),
        prev_sampled_rows_t=np.zeros(num_padded, np.int32),
        positions_t=positions_t,
        rope_lens_t=positions_t + 1,
        slots_gt=np.tile(positions_t % geometry.block_size, (len(geometry.windows), 1)),
        adapters_t=np.zeros(num_padded, np.int32),
        query_starts_s1=starts_s1,
        kv_lens_s=np.where(query_lens_s > 0, query_lens_s + np.int32(start), np.int32(0)),
        block_tables_gsm=np.zeros((len(geometry.windows), max_rows, geometry.max_blocks_per_seq), np.int32),
        kv_begins_s=np.zeros(max_rows, np.int32),
        run_starts_s1=np.full(max_rows + 1, num_rows, np.int32),
        aux_tokens_q=np.zeros(geometry.num_aux, np.int32),
        sample_tokens_s=np.maximum(starts_s1[1:] - 1, 0),
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_runs=0,
        state_sources_s=np.zeros(max_rows, np.int32),
        state_slots_s=np.zeros(max_rows, np.int32),
        is_draft_s=np.zeros(max_rows, np.bool_),
        poolings_s=np.zeros(max_rows, np.int32),
        pair_starts_s=np.full(max_rows, geometry.max_model_len, np.int32),
        is_embed_t=np.zeros(num_padded, np.bool_),
        rope_shifts_3t=np.zeros((3, num_padded), np.int32),
    )


_TPU_START_BYTES = 4e6
_GPU_START_BYTES = 1e6
_CUDA_START_BYTES = 16e6
"""What 2 TB/s read in 8 us."""
_THIRD_PASS = 1.5
"""Cost factor of the pass over the edges of windows, if it is a call separate from the second pass."""


def cascade_costs(
    backend: Backend, layout: KVLayout, kinds: Sequence[AttentionKind], num_heads: int, num_context_parts: int = 1
) -> CascadeCosts | None:
    """Return the costs on a backend; None if rows do not share prefix reads there.

    Args:
        backend: the attention backend.
        layout: one device's part of the pool.
        kinds: attention kind of each layer.
        num_heads: query heads of one device.
        num_context_parts: devices that share each context. A cost that equals n tokens on one device equals `n *
            num_context_parts` tokens of a whole context.
    """
    joint = IMPLEMENTATIONS[backend].attend_parts is not None
    has_sinks = any(kind.num_sink_tokens for kind in kinds)  # their second pass reads each row's own sink tokens
    if has_sinks or (layout.form == "gpu" and not joint):
        return None
    costs = _full_costs(backend, layout, num_heads)
    costs = dataclasses.replace(
        costs,
        granule_tokens=costs.granule_tokens * num_context_parts,
        query_tokens=costs.query_tokens * num_context_parts,
        step_tokens=costs.step_tokens * num_context_parts,
    )
    windows = Counter(kind.sliding_window for kind in kinds if kind.sliding_window is not None)
    if not windows:
        return costs
    passes = 1.0 if joint else _THIRD_PASS
    return dataclasses.replace(
        costs,
        query_tokens=costs.query_tokens * passes,
        step_tokens=costs.step_tokens * passes,
        windows=tuple((window, count / len(kinds)) for window, count in sorted(windows.items())),
    )


def _full_costs(backend: Backend, layout: KVLayout, num_heads: int) -> CascadeCosts:
    """Return the costs of attention without a sliding window."""
    block_size, group = layout.block_size, num_heads // layout.num_kv_heads
    if layout.form == "gpu":
        tile_rows, outputs, start_bytes = TILE_ROWS, 2.0, _GPU_START_BYTES
        if backend == "pallas-triton":
            group, tile_rows, outputs = get_group(layout, num_heads), shared_rows(layout, np.dtype(np.float16)), 4.0
        if backend == "cuda":
            tile_rows, outputs, start_bytes = TILE_PAIRS, 3.0, _CUDA_START_BYTES
        return CascadeCosts(
            granule_tokens=block_size,
            tile_queries=max(1, tile_rows // group),
            tile_tokens=1.0,
            query_share=0.0,
            query_tokens=outputs * group,
            step_tokens=start_bytes * block_size * layout.num_layers / layout.bytes_per_block,
        )
    if backend == "cpu":
        return CascadeCosts(
            granule_tokens=block_size,
            tile_queries=8,
            tile_tokens=3.2,
            query_share=0.0,
            query_tokens=16.0,
            step_tokens=220.0,
        )
    if layout.form == "tpu":
        return CascadeCosts(
            granule_tokens=block_size,
            tile_queries=TILE_QUERIES,
            tile_tokens=1.0,
            query_share=0.0,
            query_tokens=2.5 * num_heads / layout.num_kv_heads,
            step_tokens=_TPU_START_BYTES * block_size * layout.num_layers / layout.bytes_per_block,
        )
    return CascadeCosts(
        granule_tokens=max(1, CHUNK_TOKENS // block_size) * block_size,
        tile_queries=TILE_QUERIES,
        tile_tokens=1.7,
        query_share=0.08,
        query_tokens=16.0,
        step_tokens=100.0,
    )
