"""Mixtures of experts: routing of rows to experts, and the experts' outputs.

routing.py      rows of scores -> experts and their weights; rows sorted by expert
weights.py      the matrices of the experts of a layer, alone or in the array of all layers; the gate function
sorted_rows.py  the entry point; rows sorted by expert: a grouped matmul on accelerators, a loop over tiles on CPUs
tpu.py          the kernel of TPUs: from rows to sums, with all matrices of an expert
cpu/            the kernel that reads packed experts
"""

from jpaged.kernels.experts.routing import ExpertMap, Routes, route
from jpaged.kernels.experts.sorted_rows import ExpertsBackend, ExpertsKernel, apply_experts, sum_experts
from jpaged.kernels.experts.weights import ExpertAdapters, ExpertWeights, StackedExperts

__all__ = [
    "ExpertAdapters",
    "ExpertMap",
    "ExpertWeights",
    "ExpertsBackend",
    "ExpertsKernel",
    "Routes",
    "StackedExperts",
    "apply_experts",
    "route",
    "sum_experts",
]
