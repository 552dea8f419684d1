"""How long a step takes on a deployment: the larger of its bytes over bandwidth and its FLOPs over peak, and overhead.

    bytes  = weights + KV of every row's context / gather efficiency        read once a step; 1 where KV is contiguous
    FLOPs  = 2 * params * tokens + 4 * layers * width * (query, key) pairs
    step   = max(bytes / (devices * bandwidth * eff), FLOPs / (devices * peak * eff)) + overhead + all-reduces

    copy   = 2 * bytes / (devices * bandwidth * eff)                                  a read and a write
    swap   = blocks * 2 * layers * latency + bytes / (devices * link * eff)           small blocks swap badly

Every device of a model holds its share of each layer, so bytes and FLOPs are divided by their number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jpaged.capacity.hardware import Assumptions, Hardware
from jpaged.capacity.model_cost import ModelShape
from jpaged.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on devices, with a pool of KV blocks.

    Attributes:
        num_kv_slots: tokens that the pool holds.
        block_size: token slots in a block.
        num_host_blocks: blocks in host memory to swap out to.
        is_contiguous: a sequence's KV lies in one piece, so that nothing is gathered.
    """

    model: ModelShape
    hardware: Hardware
    num_devices: int
    num_kv_slots: int
    block_size: int = 16
    num_host_blocks: int = 0
    assumptions: Assumptions = field(default_factory=Assumptions)
    is_contiguous: bool = False

    @property
    def num_blocks(self) -> int:
        return self.num_kv_slots // self.block_size

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.model.kv_bytes_per_token

    def step_s(self, num_tokens: int, num_kv_tokens: int, num_pairs: int) -> float:
        """Seconds of a step.

        Args:
            num_tokens: that go through the model.
            num_kv_tokens: lengths of all rows' contexts, added up.
            num_pairs: (query, key) pairs that attention looks at, over all rows, in one head of one layer.
        """
        return max(self.bytes_s(num_kv_tokens), self.flops_s(num_tokens, num_pairs)) + self.overhead_s

    def bytes_s(self, num_kv_tokens: int) -> float:
        """Seconds to read the weights and so many tokens' keys and values."""
        kv_bytes = num_kv_tokens * self.model.kv_bytes_per_token / self.gather_efficiency
        return (self.model.weight_bytes + kv_bytes) / self._hbm_bytes_per_s

    def flops_s(self, num_tokens: int, num_pairs: int) -> float:
        """Seconds of the matrix products."""
        model = self.model
        flops = 2 * model.num_params * num_tokens + 4 * model.num_layers * model.width * num_pairs
        return flops / (self.num_devices * self.hardware.flops * self.assumptions.flops_efficiency)

    @property
    def overhead_s(self) -> float:
        """What every step costs besides bytes and FLOPs."""
        a = self.assumptions
        all_reduces = 2 * self.model.num_layers if self.num_devices > 1 else 0
        return a.step_overhead_s + all_reduces * a.all_reduce_s

    @property
    def gather_efficiency(self) -> float:
        """Share of the bandwidth that is left when blocks of this size are read from all over the pool."""
        if self.is_contiguous:
            return 1.0
        run_bytes = self.block_size * self.model.head_dim * 2
        return run_bytes / (run_bytes + self.assumptions.half_rate_run_bytes)

    def copy_s(self, num_blocks: int) -> float:
        return 2 * num_blocks * self.bytes_per_block / self._hbm_bytes_per_s

    def swap_s(self, num_blocks: int) -> float:
        """Seconds to move blocks one way over the host links."""
        a = self.assumptions
        rate = self.num_devices * self.hardware.host_bytes_per_s * a.host_link_efficiency
        latency_s = 2 * self.model.num_layers * a.transfer_latency_s
        return num_blocks * (latency_s + self.bytes_per_block / rate)

    @property
    def _hbm_bytes_per_s(self) -> float:
        return self.num_devices * self.hardware.hbm_bytes_per_s * self.assumptions.bandwidth_efficiency


def deploy(
    model: ModelShape,
    hardware: Hardware,
    *,
    num_devices: int | None = None,
    num_kv_slots: int | None = None,
    block_size: int = 16,
    num_host_blocks: int = 0,
) -> Deployment:
    """A deployment with the paper's pool where the paper has one, else with what the weights leave of the memory.

    Raises:
        InvalidArgument: nothing is left for one sequence of the model's full length.
    """
    assumptions, devices = Assumptions(), num_devices or model.num_devices
    if num_kv_slots is None and hardware.name == model.paper_hardware and devices == model.num_devices:
        num_kv_slots = model.num_kv_slots
    if num_kv_slots is None:
        usable = devices * hardware.hbm_bytes * assumptions.memory_utilization
        num_kv_slots = int((usable - model.weight_bytes) / model.kv_bytes_per_token)
        if num_kv_slots < model.max_model_len:
            raise InvalidArgument(
                "num_devices",
                f"{devices} x {hardware.name} leave {usable / 1e9:.1f} GB for {model.weight_bytes / 1e9:.1f} GB of "
                f"weights and the KV of {model.max_model_len} tokens "
                f"({model.max_model_len * model.kv_bytes_per_token / 1e9:.1f} GB): take more devices",
            )
    return Deployment(model, hardware, devices, num_kv_slots, block_size, num_host_blocks, assumptions)
