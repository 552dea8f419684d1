"""The experts of a family, frozen."""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.kernels.mixture_kind import SILU, Gate, Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A router, experts, and optionally an expert that all rows share, in place of a feed-forward.

    Attributes:
        routing: how rows choose experts.
        width: of one expert, F.
        gate: the gate function of gates and ups.
        has_biases: gates, ups and downs of experts have biases.
        router_bias: the router's logits have a bias.
        choice_bias: the choice of experts, but not their weights, has a bias per expert (DeepSeek-V3).
        shared_width: of the shared expert; 0 is none.
        shared_is_weighed: the shared expert is multiplied by the sigmoid of a linear layer (Qwen2-MoE).
        is_parallel: each device has some whole experts; otherwise a part of each. It does not come from config.json.
    """

    routing: Routing
    width: int
    gate: Gate = SILU
    has_biases: bool = False
    router_bias: bool = False
    choice_bias: bool = False
    shared_width: int = 0
    shared_is_weighed: bool = False
    is_parallel: bool = False

    def divides(self, num_parts: int) -> bool:
        """Return True if the matrices can be split into this many equal parts."""
        parted = self.routing.num_experts if self.is_parallel else self.width
        return parted % num_parts == 0 and self.shared_width % num_parts == 0

    def __str__(self) -> str:
        """Return a description of the split dimensions."""
        shared = f" and a shared width of {self.shared_width}" if self.shared_width else ""
        if self.is_parallel:
            return f"{self.routing.num_experts} experts{shared}"
        return f"an expert's width of {self.width}{shared}"
