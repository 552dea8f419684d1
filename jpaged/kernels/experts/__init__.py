"""Mixtures of experts: which experts a row is sent to, and what they make of it.

routing.py    rows of scores -> experts and their weights
weights.py    the matrices of the experts of a layer, and what becomes of gates and ups
apply.py      the one call: who computes, and what is added behind
stacked.py    the matrices of several layers' experts in one array
reference.py  the specification: every row by itself
sorting.py    rows sorted by expert, and back
ragged.py     rows sorted by expert and a grouped product, on accelerators
tiles.py      rows sorted by expert in tiles of one expert each: a loop over those that there are, on CPUs
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
