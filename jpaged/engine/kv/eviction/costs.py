"""Cost of getting an evicted block back: recompute its tokens, or load it from the tier below.

    recompute(i) = B * seconds a token of a large step + pair_s * B * (i * B + B / 2)    attention grows with the index
    fetch        = bytes of a block / transfer rate

The rates are those measured on the device at startup (`DeviceRates`).
"""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.engine.executor import DeviceRates


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """Costs in seconds.

    Attributes:
        first_s: compute the first block of a prompt.
        further_s: added for each block before it.
        fetch_s: load a block from the tier below.
    """

    first_s: float
    further_s: float
    fetch_s: float

    @classmethod
    def of(cls, rates: DeviceRates, block_size: int, bytes_per_block: int) -> BlockCosts:
        num_tokens, seconds = rates.forward_s[-1]
        return cls(
            first_s=block_size * (seconds / num_tokens + rates.pair_s * block_size / 2),
            further_s=rates.pair_s * block_size**2,
            fetch_s=bytes_per_block / rates.swap_in_bytes_per_s,
        )

    def recompute_s(self, index: int) -> float:
        """Return the seconds to compute the block at `index` of a prompt."""
        return self.first_s + index * self.further_s
