"""How a group leaves when blocks run out: its blocks go to host memory, or its tokens run again.

    swap        blocks out and back in        2 * blocks * bytes / copy bandwidth
    recompute   tokens as one prefill         tokens / prefill rate

"auto" takes the cheaper of the two for the group at hand, from what the device measured when it started.
"""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.config import PreemptionMode
from jpaged.engine.executor import DeviceRates
from jpaged.engine.sequence import Group


@dataclass(frozen=True, slots=True)
class Preemption:
    """Chooses the way out of a group; swapping also needs room in host memory, which is the memory's to say."""

    mode: PreemptionMode
    bytes_per_block: int
    rates: DeviceRates

    def prefers_swap(self, group: Group) -> bool:
        """The group's blocks go to host memory where there is room for them; else its tokens run again."""
        if self.mode == "auto":
            return self.swap_s(group) < self.recompute_s(group)
        return self.mode == "swap"

    def swap_s(self, group: Group) -> float:
        """Seconds to move a group's blocks out and back in."""
        blocks = {block_id for sequence in group.live for block_id in sequence.kv.block_ids()}
        num_bytes = len(blocks) * self.bytes_per_block
        return num_bytes / self.rates.swap_out_bytes_per_s + num_bytes / self.rates.swap_in_bytes_per_s

    def recompute_s(self, group: Group) -> float:
        """Seconds to run a group's tokens again: the prompt once, and what each sequence sampled."""
        live = group.live
        num_tokens = live[0].num_prompt_tokens + sum(sequence.num_output_tokens for sequence in live)
        return num_tokens / self.rates.prefill_tokens_per_s
