"""Mixtures of experts: routing of rows to experts, and the experts' outputs.

routing.py    rows of scores -> experts and their weights
weights.py    the matrices of the experts of a layer, and the gate function
apply.py      the entry point: chooses the backend, and adds the last bias
stacked.py    the matrices of several layers' experts in one array
reference.py  the specification: every row by itself
sorting.py    rows sorted by expert, and the inverse
ragged.py     rows sorted by expert and a grouped matmul, on accelerators
tiles.py      rows sorted by expert in tiles of one expert each, in a loop over the tiles, on CPUs
cpu/          the kernel that reads packed experts
"""

from jpaged.kernels.experts.apply import ExpertsBackend, ExpertsKernel, apply_experts, sum_experts
from jpaged.kernels.experts.routing import Routes, route
from jpaged.kernels.experts.stacked import StackedExperts
from jpaged.kernels.experts.weights import ExpertWeights

__all__ = [
    "ExpertWeights",
    "ExpertsBackend",
    "ExpertsKernel",
    "Routes",
    "StackedExperts",
    "apply_experts",
    "route",
    "sum_experts",
]
