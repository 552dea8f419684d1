"""Routing and gates of a mixture of experts: descriptions, without arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jpaged.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Routing:
    """Rule by which rows choose experts. Hashable, static under jit.

    Attributes:
        num_experts: X.
        top_k: experts of each row, K.
        scores: function of the logits: `softmax` over all experts, `sigmoid` of each, `chosen`, a softmax over those
            that were chosen by their logits, or `sparsemixer`, for each chosen one a softmax over those not chosen
            before it whose logits are close to its own (Liu et al. 2024, arXiv 2409.12136).
        normalises: the weights of a row are divided by their sum.
        scale: factor of the weights after that.
        num_groups: groups of consecutive experts; with one there is no choice of groups.
        top_groups: groups that a row may choose from.
        num_best: number of a group's best scores whose sum is the group's score.
        jitter: half of the relative distance up to which logits are close (sparsemixer).

    Raises:
        InvalidArgument: the numbers contradict each other.
    """

    num_experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid", "chosen", "sparsemixer"] = "softmax"
    normalises: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    num_best: int = 1
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise InvalidArgument("num_experts", f"is {self.num_experts}; it must be at least 1")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise InvalidArgument("num_groups", f"is {self.num_groups}; it must divide {self.num_experts} experts")
        if not 1 <= self.top_groups <= self.num_groups:
            raise InvalidArgument(
                "top_groups", f"is {self.top_groups}; it must be from 1 to the number of groups, {self.num_groups}"
            )
        size = self.num_experts // self.num_groups
        if not 1 <= self.top_k <= self.top_groups * size:
            raise InvalidArgument("top_k", f"is {self.top_k}; it must be from 1 to {self.top_groups * size} experts")
        if self.num_groups > 1 and not 1 <= self.num_best <= size:
            raise InvalidArgument("num_best", f"is {self.num_best}; a group has {size} experts")
        if self.scores in ("chosen", "sparsemixer") and self.num_groups > 1:
            raise InvalidArgument("num_groups", f"is {self.num_groups}; groups are not supported for logits")


@dataclass(frozen=True, slots=True)
class GateFunction:
    """Function that combines a gate and an up into one number. Hashable, static under jit.

    Attributes:
        kind: `silu`, silu(gate) * up; `gelu_tanh`, the approximate gelu(gate) * up; `relu2`, relu(up) squared, without
            gates; or `clamped`, (up + 1) * gate * sigmoid(alpha * gate), with gates clamped to at most `limit` and ups
            to [-limit, limit] (gpt-oss).
    """

    kind: Literal["silu", "gelu_tanh", "relu2", "clamped"] = "silu"
    alpha: float = 1.0
    limit: float = float("inf")

    @property
    def has_gates(self) -> bool:
        """False if there are only ups."""
        return self.kind != "relu2"


SILU = GateFunction()
