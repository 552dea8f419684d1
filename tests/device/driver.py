"""Drives an executor by hand: sequences with block tables, and steps made of any chunks of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jpaged.engine.executor import Detail, Executor, Geometry, SamplingInputs, StepInputs, StepOutputs


@dataclass
class Sequence:
    """Tokens, how many of them are in the pool, and the blocks that they lie in, one KV group after the other.

    With recurrent state it has a slot for that, and one for each draft token.
    """

    tokens: list[int]
    prompt_len: int
    blocks: list[int]
    num_computed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    adapter: int = 0
    states: list[int] = field(default_factory=list)


@dataclass
class Row:
    """The next `num_tokens` of a sequence; prev_sampled_row feeds its last one from the step before."""

    sequence: Sequence
    num_tokens: int
    prev_sampled_row: int | None = None


@dataclass
class Driver:
    """Owns the blocks of the sequences that it makes."""

    executor: Executor
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __post_init__(self) -> None:
        self.geometry: Geometry = self.executor.geometry
        self.free: list[int] = (self.rng.permutation(self.geometry.num_blocks) + 1).tolist()
        self.free_states = list(range(1, self.geometry.num_state_slots + 1)) if self.geometry.state_bytes else []

    def sequence(self, prompt: list[int], **how: float) -> Sequence:
        num_blocks = len(self.geometry.windows) * self.geometry.max_blocks_per_seq
        blocks, self.free = self.free[:num_blocks], self.free[num_blocks:]
        num_states = 1 + self.geometry.num_speculative_tokens
        states, self.free_states = self.free_states[:num_states], self.free_states[num_states:]
        return Sequence(list(prompt), len(prompt), blocks, states=states, **how)  # type: ignore[arg-type]

    def release(self, sequence: Sequence) -> None:
        self.free += sequence.blocks
        self.free_states += sequence.states

    def keep_state(self, sequence: Sequence, slot: int) -> None:
        """Go on with the state in one of a sequence's slots."""
        if sequence.states:
            place = sequence.states.index(slot)
            sequence.states[0], sequence.states[place] = slot, sequence.states[0]

    def run(self, rows: list[Row], *, detail: Detail = Detail.LOGPROBS) -> StepOutputs:
        outputs = self.executor.collect(self.start(rows, detail=detail))
        for row in rows:
            row.sequence.num_computed += row.num_tokens
        return outputs

    def start(self, rows: list[Row], *, detail: Detail = Detail.LOGPROBS) -> Any:
        hidden = self.executor.forward(self.inputs(rows))
        return self.executor.sample(hidden, self.sampling(rows, detail=detail))

    def inputs(self, rows: list[Row]) -> StepInputs:
        geometry, block_size = self.geometry, self.geometry.block_size
        num_tokens = sum(row.num_tokens for row in rows)
        t, s = geometry.buckets.num_tokens(num_tokens), geometry.max_num_seqs
        ids, positions, lens, feeds = (np.zeros(t, np.int32) for _ in range(4))
        slots = np.zeros((len(geometry.windows), t), np.int32)
        adapters = np.zeros(t, np.int32)
        is_prev_sampled = np.zeros(t, np.bool_)
        starts, kv_lens = np.full(s + 1, num_tokens, np.int32), np.zeros(s, np.int32)
        tables = np.zeros((len(geometry.windows), s, geometry.max_blocks_per_seq), np.int32)
        states_sw = np.zeros((s, 1 + geometry.num_speculative_tokens), np.int32)
        begin = 0
        for i, row in enumerate(rows):
            states_sw[i, : len(row.sequence.states)] = row.sequence.states
            sequence = row.sequence
            starts[i], kv_lens[i] = begin, sequence.num_computed + row.num_tokens
            tables[:, i] = np.reshape(sequence.blocks, (len(tables), -1))
            for position in range(sequence.num_computed, kv_lens[i]):
                place = begin + position - sequence.num_computed
                if row.prev_sampled_row is not None and position == kv_lens[i] - 1:
                    is_prev_sampled[place], feeds[place] = True, row.prev_sampled_row
                adapters[place] = sequence.adapter
                ids[place] = 0 if is_prev_sampled[place] else sequence.tokens[position]
                positions[place], lens[place] = position, max(position + 1, sequence.prompt_len)
                slots[:, place] = tables[:, i, position // block_size] * block_size + position % block_size
            begin += row.num_tokens
        return StepInputs(
            token_ids_t=ids,
            is_prev_sampled_t=is_prev_sampled,
            prev_sampled_rows_t=feeds,
            positions_t=positions,
            rope_lens_t=lens,
            slots_gt=slots,
            adapters_t=adapters,
            query_starts_s1=starts,
            kv_lens_s=kv_lens,
            block_tables_gsm=tables,
            kv_begins_s=np.zeros(s, np.int32),
            run_starts_s1=np.full(s + 1, len(rows), np.int32),
            aux_tokens_q=np.zeros(self.geometry.num_aux, np.int32),
            sample_tokens_s=np.maximum(starts[1:] - 1, 0),
            num_rows=len(rows),
            num_tokens=num_tokens,
            num_runs=0,
            state_sources_s=states_sw[:, 0],
            state_slots_s=states_sw[:, 0],
            is_draft_s=np.zeros(s, np.bool_),
            draft_slots_sk=states_sw[:, 1:] if geometry.state_bytes else None,
        )

    def sampling(self, rows: list[Row], *, detail: Detail = Detail.LOGPROBS) -> SamplingInputs:
        inputs = SamplingInputs.neutral(self.geometry.buckets.num_rows(len(rows)), detail=detail)
        sequences = [row.sequence for row in rows]
        inputs.fill_columns(
            range(len(rows)),
            {
                "temperature_r": [sequence.temperature for sequence in sequences],
                "top_p_r": [sequence.top_p for sequence in sequences],
                "seeds_r2": [divmod(sequence.seed, 2**32) for sequence in sequences],
                "positions_r": [row.sequence.num_computed + row.num_tokens for row in rows],
            },
        )
        return inputs
