"""How long a step takes, at best and as assumed: the larger of its bytes over bandwidth and its FLOPs over peak.

    bytes     = weights (but the embedding, of which rows are looked up) + KV of every row's context
    FLOPs     = 2 * params * tokens + 4 * layers * query width * (query, key) pairs
    sums      = (2 * layers + 1) all-reduces of [tokens, E] float32, each 2 * (n - 1) / n of its bytes over the links
                and 2 * (size - 1) hops along every axis
    step      = max(bytes / (bandwidth * eff), FLOPs / (peak * eff)) + sums, and no less than the host's part

All are of one device, which has an equal share of every layer. The host prepares a step while the device runs the one
before, so its time counts only where it is the longer. The efficiencies are those of the simulator
(`jpaged.capacity.hardware.Assumptions`); those of links and host are below. Nothing was measured on these devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.capacity.hardware import Assumptions
from jpaged.capacity.target import Target

LINK_EFFICIENCY = 0.5
"""Of all links of a device: a small slice has no wrap-around, and a ring does not use every link at once."""
HOP_S = 1e-6
HOST_S, HOST_ROW_S = 0.1e-3, 0.01e-3
"""A step of the host: measured on one CPU core, 0.75 ms for 64 rows (benchmarks/results/host_step.json)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step of a model reads and computes.

    Attributes:
        num_params: that are multiplied with: all but an embedding that is only looked up.
        num_layers: of the model.
        query_width: query heads times head dimension.
        hidden_size: width of what is summed over devices.
        weight_bytes: that one device reads in a step.
        kv_bytes_per_token: of one device, all layers.
        number_bytes: of each number that is summed over devices.
    """

    num_params: int
    num_layers: int
    query_width: int
    hidden_size: int
    weight_bytes: int
    kv_bytes_per_token: float
    number_bytes: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model split over some devices of a target."""

    shape: Shape
    target: Target
    num_devices: int

    def step_s(self, num_rows: int, num_tokens: int, num_kv_tokens: float, num_pairs: float) -> float:
        """Seconds of a step.

        Args:
            num_rows: sequences in it.
            num_tokens: that go through the model.
            num_kv_tokens: lengths of all rows' contexts, added up.
            num_pairs: (query, key) pairs that attention looks at in one head of one layer.
        """
        shape, assumed = self.shape, Assumptions()
        num_bytes = shape.weight_bytes + num_kv_tokens * shape.kv_bytes_per_token
        flops = 2 * shape.num_params * num_tokens + 4 * shape.num_layers * shape.query_width * num_pairs
        memory_s = num_bytes / (self.target.hbm_bytes_per_s * assumed.bandwidth_efficiency)
        compute_s = flops / self.num_devices / (self.target.flops * assumed.flops_efficiency)
        device_s = max(memory_s, compute_s) + self._sums_s(num_tokens)
        return max(device_s, HOST_S + HOST_ROW_S * num_rows)

    def decode_s(self, num_rows: int, context_len: float) -> float:
        """One token for each of so many rows with a context of this length."""
        num_kv_tokens = num_rows * context_len
        return self.step_s(num_rows, num_rows, num_kv_tokens, num_kv_tokens)

    def prefill_s(self, num_tokens: int, prompt_len: float) -> float:
        """So many tokens of prompts of this length, at the mean of their positions."""
        num_rows = max(1.0, num_tokens / prompt_len)
        return self.step_s(int(num_rows), num_tokens, num_rows * prompt_len / 2, num_tokens * prompt_len / 2)

    def _sums_s(self, num_tokens: int) -> float:
        n = self.num_devices
        if n == 1:
            return 0.0
        num_bytes = num_tokens * self.shape.hidden_size * self.shape.number_bytes
        moved_s = 2 * (n - 1) / n * num_bytes / (self.target.link_bytes_per_s * LINK_EFFICIENCY)
        # A part of the slice is taken to be a line.
        axes = self.target.shape if n == self.target.num_devices else (n,)
        hops = sum(2 * (size - 1) for size in axes)
        return (2 * self.shape.num_layers + 1) * (moved_s + max(hops, 2) * HOP_S)
