"""The leaves of a mixture's tree, under the tensor names of a family's checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jpaged.models.experts.mixture import Mixture
from jpaged.models.leaves import Leaf, Linears, LogicalAxes, same, stacked_kernel, transpose, transposed

_Tensors = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Tensor names of a mixture in a family's checkpoints, without `.weight` and `.bias`.

    Attributes:
        router: of a layer, as all that follow.
        choice_bias: the complete name.
        experts: prefix of the experts' names, before the number.
        gate, up, down: follow the number, which is missing if each tensor has all experts.
        is_fused: each tensor has all experts, weights are `[X, in, out]`, and gates and ups alternate in the tensor
            named by `gate` (gpt-oss). Their biases are called `<name>_bias`.
        shared: prefix of the shared expert's names.
        shared_score: the linear layer whose output weights the shared expert.
    """

    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    is_fused: bool = False
    shared: str = "mlp.shared_expert."
    shared_score: str = "mlp.shared_expert_gate"


QWEN_EXPERTS = ExpertNames()


def mixture_leaves(mixture: Mixture, width: int, prefix: str, names: ExpertNames) -> list[Leaf]:
    """Return the leaves of a mixture for hidden states of a width, in a layer with this prefix."""
    num_experts = mixture.routing.num_experts
    router = prefix + names.router
    leaves = [transposed(("mlp", "router", "kernel"), f"{router}.weight", ("embed", None), (width, num_experts))]
    if mixture.router_bias:
        leaves.append(same(("mlp", "router", "bias"), f"{router}.bias", (None,), (num_experts,)))
    if mixture.choice_bias:
        bias = same(("mlp", "router", "choice_bias"), prefix + names.choice_bias, (None,), (num_experts,))
        leaves.append(dataclasses.replace(bias, dtype=np.dtype(np.float32)))
    for part in ("gate", "up", "down"):
        leaves.append(_kernel(mixture, width, prefix, names, part))
        if mixture.has_biases:
            leaves.append(_bias(mixture, width, prefix, names, part))
    if mixture.shared_width:
        leaves += _shared(mixture, width, prefix, names)
    return leaves


def expert_axes(mixture: Mixture, part: str) -> LogicalAxes:
    """Return the axis names of a kernel: devices split the experts, or the width of each."""
    experts, inner = ("expert_parts", None) if mixture.is_parallel else ("experts", "feed_forward")
    return (experts, inner, "embed") if part == "down" else (experts, "embed", inner)


def _kernel(mixture: Mixture, width: int, prefix: str, names: ExpertNames, part: str) -> Leaf:
    num_experts, inner = mixture.routing.num_experts, mixture.width
    shape = (num_experts, inner, width) if part == "down" else (num_experts, width, inner)
    path, axes = ("mlp", "experts", part, "kernel"), expert_axes(mixture, part)
    if names.is_fused:
        return _fused(path, axes, shape, f"{prefix}{names.experts}{_fused_name(names, part)}", part)

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        for tensor, matrix in zip(tensors, leaf, strict=True):
            transpose(tensor, matrix)

    name = getattr(names, part)
    tensors = tuple(
        (f"{prefix}{names.experts}{index}.{name}.weight", (shape[2], shape[1])) for index in range(num_experts)
    )
    return Leaf(path, axes, shape, tensors, pack, (None, 1, 0))


def _bias(mixture: Mixture, width: int, prefix: str, names: ExpertNames, part: str) -> Leaf:
    num_experts = mixture.routing.num_experts
    shape = (num_experts, width if part == "down" else mixture.width)
    path, kernel_axes = ("mlp", "experts", part, "bias"), expert_axes(mixture, part)
    # A bias after a sum over devices is whole on each of them.
    axes: LogicalAxes = (None, "embed") if part == "down" else (kernel_axes[0], kernel_axes[2])
    if names.is_fused:
        return _fused(path, axes, shape, f"{prefix}{names.experts}{_fused_name(names, part)}_bias", part)

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        for tensor, bias in zip(tensors, leaf, strict=True):
            bias[...] = tensor

    name = getattr(names, part)
    tensors = tuple((f"{prefix}{names.experts}{index}.{name}.bias", shape[1:]) for index in range(num_experts))
    return Leaf(path, axes, shape, tensors, pack, (None, 0))


def _fused_name(names: ExpertNames, part: str) -> str:
    return names.down if part == "down" else names.gate


def _fused(path: tuple[str, ...], axes: LogicalAxes, shape: tuple[int, ...], name: str, part: str) -> Leaf:
    """Return a leaf from a tensor with all experts, in which gates and ups alternate along the last axis."""
    if part == "down":
        return same(path, name, axes, shape)
    first = ("gate", "up").index(part)

    def pack(tensors: Sequence[np.ndarray], leaf: np.ndarray) -> None:
        leaf[...] = tensors[0][..., first::2]

    stored = (*shape[:-1], 2 * shape[-1])
    return Leaf(path, axes, shape, ((name, stored),), pack, tuple(range(len(shape))))


def _shared(mixture: Mixture, width: int, prefix: str, names: ExpertNames) -> list[Leaf]:
    inner, into = mixture.shared_width, Linears(tuple(f"{prefix}{names.shared}{part}_proj" for part in ("gate", "up")))
    down = f"{prefix}{names.shared}down_proj.weight"
    leaves = [
        stacked_kernel(
            ("mlp", "shared", "gate_up", "kernel"), into, ("embed", None, "feed_forward"), (width, 2, inner)
        ),
        transposed(("mlp", "shared", "down", "kernel"), down, ("feed_forward", "embed"), (inner, width)),
    ]
    if mixture.shared_is_weighed:
        name = f"{prefix}{names.shared_score}.weight"
        leaves.append(transposed(("mlp", "shared", "score", "kernel"), name, ("embed", None), (width, 1)))
    return leaves
