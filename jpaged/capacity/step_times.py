"""How long a step of ours takes, at best and as assumed: what the devices take, their sums, and no less than the host.

    devices   = the roofline of a step (`jpaged.capacity.cost`)
    sums      = (2 * layers + 1) all-reduces of [tokens, E] float32, each 2 * (n - 1) / n of its bytes over the links
                and 2 * (size - 1) hops along every axis
    step      = devices + sums, and no less than the host's part

The host prepares a step while the device runs the one before, so its time counts only where it is the longer. Nothing
was measured on these devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.capacity.cost import Roofline
from jpaged.capacity.target import Target

LINK_EFFICIENCY = 0.5
"""The share of a device's links that is in use: small slices have no wrap-around, a ring uses not all at once."""
HOP_S = 1e-6
HOST_S, HOST_ROW_S = 0.1e-3, 0.01e-3
"""A step of the host at most, 0.74 ms for 64 rows; `benchmarks/results/host_step.json` has what one takes."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A model split over some devices of a target.

    Attributes:
        roofline: of the model on so many devices.
        target: that they are of.
        hidden_size: width of what is summed over devices.
        number_bytes: of each number that is summed over devices.
    """

    roofline: Roofline
    target: Target
    hidden_size: int
    number_bytes: float

    def step_s(self, num_rows: int, num_tokens: int, num_kv_tokens: float, num_pairs: float) -> float:
        """Seconds of a step of so many sequences; the other arguments are the roofline's."""
        device_s = self.roofline.step_s(num_tokens, num_kv_tokens, num_pairs) + self._sums_s(num_tokens)
        return max(device_s, HOST_S + HOST_ROW_S * num_rows)

    def decode_s(self, num_rows: int, context_len: float) -> float:
        """Seconds of a step of one token for each of so many rows with a context of this length."""
        num_kv_tokens = num_rows * context_len
        return self.step_s(num_rows, num_rows, num_kv_tokens, num_kv_tokens)

    def prefill_s(self, num_tokens: int, prompt_len: float) -> float:
        """Seconds of a step of so many tokens of prompts of this length, at the mean of their positions."""
        num_rows = max(1.0, num_tokens / prompt_len)
        return self.step_s(int(num_rows), num_tokens, num_rows * prompt_len / 2, num_tokens * prompt_len / 2)

    def _sums_s(self, num_tokens: int) -> float:
        n = self.roofline.num_devices
        if n == 1:
            return 0.0
        num_bytes = num_tokens * self.hidden_size * self.number_bytes
        moved_s = 2 * (n - 1) / n * num_bytes / (self.target.hardware.link_bytes_per_s * LINK_EFFICIENCY)
        # A part of the slice is taken to be a line.
        axes = self.target.shape if n == self.target.num_devices else (n,)
        hops = sum(2 * (size - 1) for size in axes)
        return (2 * self.roofline.shape.num_layers + 1) * (moved_s + max(hops, 2) * HOP_S)
