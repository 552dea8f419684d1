"""What it costs to have a block again: its tokens run once more, or it is brought back from a tier below.

    recompute(i) = B * seconds a token of a large step + pair_s * B * (i * B + B / 2)    attention grows with the place
    fetch        = bytes of a block / the rate at which they come back

As the device was timed when it started (`DeviceRates`).
"""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.engine.executor import DeviceRates


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """Seconds.

    Attributes:
        first_s: to compute a block that nothing is in front of.
        further_s: what each block in front adds.
        fetch_s: to bring it back from the tier below.
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
        """Seconds to compute a block with so many in front of it."""
        return self.first_s + index * self.further_s
