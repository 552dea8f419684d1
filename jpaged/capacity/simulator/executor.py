"""Executor that computes no tokens: it advances a clock by the duration of each step.

Sampled tokens are all 0. If top log-probabilities are needed (beam search), each row's are a geometric distribution,
log p_k = log p + k log(1 - p) for the k-th likeliest from k = 0, with p from 0.05 to 0.95 by a hash of step, row and
context length: some positions are nearly certain and others wide open, so that beams die and fork all the time, as they
do on text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from jpaged.capacity.cost import StepLoad
from jpaged.capacity.simulator.deployment import Deployment
from jpaged.capacity.simulator.steady import Seen
from jpaged.engine.executor import (
    I32,
    TOP_WIDTH,
    BlockMoves,
    BucketTable,
    Detail,
    DeviceRates,
    Geometry,
    HostBlocks,
    MaskFeed,
    Move,
    Progress,
    SamplingInputs,
    StepInputs,
    StepOutputs,
)
from jpaged.engine.executor.steps import TellInputs, ToldOutputs
from jpaged.errors import InternalError
from jpaged.testing.single_steps import step_at
from jpaged.testing.virtual_clock import VirtualClock
from jpaged.types import Adapter

_HASH = np.uint64(0x9E3779B97F4A7C15)


class SimulatedExecutor:
    """Implements `jpaged.engine.executor.Executor`.

    Attributes:
        copy_s, swap_s: seconds of all copies within the pool, and of all swaps, so far.
        seen: the last step.
    """

    num_compiles_after_warm_up = 0

    def __init__(
        self,
        deployment: Deployment,
        clock: VirtualClock,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        counts_sharing: bool = False,
    ) -> None:
        config = deployment.model.config
        self.seen = Seen(0, 0, 0, False)
        self._counts_sharing = counts_sharing
        self.copy_s = 0.0
        self.swap_s = 0.0
        self._deployment = deployment
        self._clock = clock
        self._num_steps = 0
        self.geometry = Geometry(
            num_blocks=deployment.num_blocks,
            block_size=deployment.block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            bytes_per_block=deployment.bytes_per_block,
            buckets=BucketTable.build(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs),
            num_host_blocks=deployment.num_host_blocks,
        )
        self._plain = StepOutputs(
            token_ids_rn=np.zeros((max_num_seqs, 1), np.int32),
            is_sound_rn=np.ones((max_num_seqs, 1), np.bool_),
            logprobs_rn=np.zeros((max_num_seqs, 1), np.float32),
            ranks_rn=np.ones((max_num_seqs, 1), np.int32),
        )

    @property
    def rates(self) -> DeviceRates:
        swap = self._deployment.bytes_per_block / self._deployment.swap_s(1)

        def step_s(num_tokens: int, num_pairs: int) -> float:
            return self._deployment.step_s(StepLoad(0, num_tokens, 0, num_pairs))

        forward_s = tuple((size, step_s(size, 0)) for size in self.geometry.buckets.tokens)
        num_tokens, seconds = forward_s[-1]
        num_pairs = num_tokens * self.geometry.max_model_len  # upper bound for one step
        return DeviceRates(swap, swap, forward_s, (step_s(num_tokens, num_pairs) - seconds) / num_pairs)

    @property
    def host_blocks(self) -> HostBlocks | None:
        """None: simulated blocks have no bytes."""
        return None

    def warm_up(self, progress: Progress) -> None:
        progress("programs", 1, 1)

    def move_blocks(self, moves: BlockMoves) -> None:
        """Advance the clock at once: later steps wait for the moves."""
        num_blocks = len(moves.sources)
        if moves.move is Move.COPY:
            seconds = self._deployment.copy_s(num_blocks)
            self.copy_s += seconds
        else:
            seconds = self._deployment.swap_s(num_blocks)
            self.swap_s += seconds
        self._clock.advance(seconds)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Do nothing: simulated servers have no slots."""

    def forward(self, inputs: StepInputs) -> NDArray[np.int32]:
        """Advance the clock by the whole step. Return the lengths of the rows' contexts."""
        num_rows = inputs.num_rows
        query_lens = np.diff(inputs.query_starts_s1[: num_rows + 1]).astype(np.int64)
        kv_lens = np.where(query_lens > 0, inputs.kv_lens_s[:num_rows], 0).astype(np.int64)
        num_kv_tokens = int(kv_lens.sum())
        is_decoding = query_lens == 1
        load = StepLoad(
            num_rows=num_rows,
            num_tokens=inputs.num_tokens,
            num_kv_tokens=num_kv_tokens,
            num_pairs=inputs.num_pairs,
            num_decoding=int(is_decoding.sum()),
            num_decoding_kv_tokens=int(kv_lens[is_decoding].sum()),
        )
        seconds = self._deployment.step_s(load)
        self._clock.advance(seconds)
        self._num_steps += 1
        roofline = self._deployment.roofline
        is_flops_bound = roofline.flops_s(load) > roofline.bytes_s(num_kv_tokens)
        self.seen = Seen(num_kv_tokens, *self._count_blocks(inputs), is_flops_bound)
        return inputs.kv_lens_s[:num_rows]

    def sample(self, hidden: NDArray[np.int32], inputs: SamplingInputs) -> StepOutputs:
        return self._top_logprobs(hidden) if inputs.detail == Detail.TOP_LOGPROBS else self._plain

    def tell(self, hidden: NDArray[np.int32], inputs: TellInputs) -> Callable[[], ToldOutputs]:
        """Return empty outputs in no time: simulated requests need no prompt log-probabilities."""
        return ToldOutputs

    def decode(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> StepOutputs:
        """Advance the clock by all steps: the tokens end no row."""
        for place in range(num_steps):
            self.forward(step_at(place, inputs, sampling, self.geometry.block_size)[0])
        shape = len(ending_token_ids_rx), num_steps
        return StepOutputs(np.zeros(shape, np.int32), np.ones(shape, np.bool_))

    def decode_fed(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> tuple[StepOutputs, MaskFeed]:
        """Raise an error, because simulated servers have no grammars.

        Raises:
            InternalError: always.
        """
        raise InternalError(f"a simulated server cannot run steps that wait for masks ({num_steps} steps)")

    def speculate(
        self,
        inputs: StepInputs,
        sampling: SamplingInputs,
        ending_token_ids_rx: I32,
        num_left_r: I32,
        num_rounds: int,
        unseen: Sequence[StepInputs] = (),
    ) -> StepOutputs:
        """Raise an error, because simulated servers have no draft model.

        Raises:
            InternalError: always.
        """
        raise InternalError(f"a simulated server has no draft model for {num_rounds} speculative rounds")

    def is_done(self, handle: StepOutputs) -> bool:
        return True

    def collect(self, handle: StepOutputs) -> StepOutputs:
        return handle

    def shutdown(self) -> None:
        """Do nothing: the executor has no resources."""

    def _count_blocks(self, inputs: StepInputs) -> tuple[int, int]:
        """Return the number of blocks in the rows' tables, and the number of distinct ones."""
        num_blocks_s = -(-inputs.kv_lens_s[: inputs.num_rows] // self.geometry.block_size)
        num_table_blocks = int(num_blocks_s.sum())
        if not self._counts_sharing:
            return num_table_blocks, 0
        block_tables_sm = inputs.block_tables_gsm[0, : inputs.num_rows, : int(num_blocks_s.max())]
        is_named_sm = np.arange(block_tables_sm.shape[1]) < num_blocks_s[:, None]
        return num_table_blocks, int(np.unique(block_tables_sm[is_named_sm]).size)

    def _top_logprobs(self, kv_lens: NDArray[np.int32]) -> StepOutputs:
        num_rows = len(kv_lens)
        place = np.uint64(self._num_steps) << np.uint64(32)
        hashed = (kv_lens.astype(np.uint64) + np.arange(num_rows, dtype=np.uint64) * np.uint64(65537) + place) * _HASH
        hashed = (hashed ^ (hashed >> np.uint64(29))) * _HASH
        p_r = 0.05 + 0.9 * ((hashed >> np.uint64(11)) / float(1 << 53))
        logprobs_rk = np.log(p_r)[:, None] + np.arange(TOP_WIDTH) * np.log1p(-p_r)[:, None]
        ids_rk = np.broadcast_to(np.arange(TOP_WIDTH, dtype=np.int32), (num_rows, TOP_WIDTH))
        return StepOutputs(
            token_ids_rn=self._plain.token_ids_rn,
            is_sound_rn=self._plain.is_sound_rn,
            logprobs_rn=self._plain.logprobs_rn,
            ranks_rn=self._plain.ranks_rn,
            top_ids_rnk=ids_rk[:, None],
            top_logprobs_rnk=logprobs_rk[:, None].astype(np.float32),
        )
