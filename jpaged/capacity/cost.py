"""How long the devices of a model take for a step: the larger of its bytes over bandwidth and its FLOPs over peak.

    bytes  = weights + KV of every row's context / gather efficiency        read once a step
    FLOPs  = 2 * params * tokens + 4 * layers * query width * (query, key) pairs
    step   = max(bytes / (devices * bandwidth * eff), FLOPs / (devices * peak * eff))

Every device of a model holds its share of each layer, so bytes and FLOPs are divided by their number. What comes
besides is the system's: its host, its sums over devices (`jpaged.capacity.step_times`, and of the system that the
paper measured `jpaged.capacity.simulator.deployment`).
"""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.capacity.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What no data sheet says.

    Attributes:
        bandwidth_efficiency: of the HBM's peak, for weights and long runs of KV memory.
        flops_efficiency: of the peak, for the matrix products.
        host_link_efficiency: of the link's peak, for long transfers.
        step_overhead_s: host work and kernel launches of a step that do not overlap with the device.
        all_reduce_s: one all-reduce between the devices of one model; two a layer.
        transfer_latency_s: what a transfer over the host link costs besides its bytes. A block is 2 * num_layers
            transfers (its keys and its values in each layer), as in the system that the paper measured.
        half_rate_run_bytes: gathered KV memory is read at half the bandwidth when its consecutive run (one head's part
            of a block) has this many bytes: run / (run + this) of it. 942 makes blocks of 16 with heads of 128 slower
            by 23 percent than contiguous memory, the middle of the 20 to 26 that the PagedAttention paper measured of
            its kernel (section 7.1); that other sizes follow the same curve is assumed.
        memory_utilization: share of HBM for weights and KV pool where a pool is not given.
    """

    bandwidth_efficiency: float = 0.7
    flops_efficiency: float = 0.5
    host_link_efficiency: float = 0.8
    step_overhead_s: float = 0.005
    all_reduce_s: float = 20e-6
    transfer_latency_s: float = 5e-6
    half_rate_run_bytes: float = 942.0
    memory_utilization: float = 0.9


ASSUMED = Assumptions()


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step of a model reads and computes, on all its devices together.

    Attributes:
        num_params: that are multiplied with.
        query_width: query heads times head dimension.
        weight_bytes: that are read in a step.
        kv_bytes_per_token: all layers.
    """

    num_params: float
    num_layers: int
    query_width: int
    weight_bytes: float
    kv_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model split over devices.

    Attributes:
        gather_efficiency: share of the bandwidth that is left for keys and values; 1 where they lie in long runs.
    """

    shape: Shape
    hardware: Hardware
    num_devices: int
    assumptions: Assumptions = ASSUMED
    gather_efficiency: float = 1.0

    @property
    def bytes_per_s(self) -> float:
        """The bytes a second that all devices together read."""
        return self.num_devices * self.hardware.hbm_bytes_per_s * self.assumptions.bandwidth_efficiency

    def step_s(self, num_tokens: int, num_kv_tokens: float, num_pairs: float) -> float:
        """Seconds of a step.

        Args:
            num_tokens: that go through the model.
            num_kv_tokens: lengths of all rows' contexts, added up.
            num_pairs: (query, key) pairs that attention looks at, over all rows, in one head of one layer.
        """
        return max(self.bytes_s(num_kv_tokens), self.flops_s(num_tokens, num_pairs))

    def bytes_s(self, num_kv_tokens: float) -> float:
        """Seconds to read the weights and so many tokens' keys and values."""
        kv_bytes = num_kv_tokens * self.shape.kv_bytes_per_token / self.gather_efficiency
        return (self.shape.weight_bytes + kv_bytes) / self.bytes_per_s

    def flops_s(self, num_tokens: int, num_pairs: float) -> float:
        """Seconds of the matrix products."""
        shape = self.shape
        flops = 2 * shape.num_params * num_tokens + 4 * shape.num_layers * shape.query_width * num_pairs
        return flops / (self.num_devices * self.hardware.flops * self.assumptions.flops_efficiency)
