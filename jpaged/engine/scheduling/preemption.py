"""Preemption modes: a preempted group's blocks are swapped to host memory, or its tokens are recomputed.

    swap        blocks out and back in        2 * blocks * bytes / copy bandwidth
    recompute   tokens as one prefill         tokens / prefill rate

"auto" takes the cheaper of the two for each group, by the rates measured when the device started.
"""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.config import PreemptionMode
from jpaged.engine.executor import DeviceRates
from jpaged.engine.sequence import Group


@dataclass(frozen=True, slots=True)
class Preemption:
    """Chooses between swap and recompute. The memory decides if host memory has room for a swap."""

    mode: PreemptionMode
    bytes_per_block: int
    rates: DeviceRates

    def prefers_swap(self, group: Group) -> bool:
        """Return True if the group should be swapped, given room in host memory; otherwise it is recomputed."""
        if self.mode == "auto":
            return self.swap_s(group) < self.recompute_s(group)
        return self.mode == "swap"

    def swap_s(self, group: Group) -> float:
        """Return the seconds to move a group's blocks out and back in."""
        blocks = {block_id for sequence in group.live for block_id in sequence.kv.block_ids()}
        num_bytes = len(blocks) * self.bytes_per_block
        return num_bytes / self.rates.swap_out_bytes_per_s + num_bytes / self.rates.swap_in_bytes_per_s

    def recompute_s(self, group: Group) -> float:
        """Return the seconds to recompute a group: the prompt once, and the output of each sequence."""
        live = group.live
        num_tokens = live[0].num_prompt_tokens + sum(sequence.num_output_tokens for sequence in live)
        return num_tokens / self.rates.prefill_tokens_per_s
