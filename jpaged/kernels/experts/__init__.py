"""Mixtures of experts: which experts a row is sent to, and what they make of it.

routing.py    rows of scores -> experts and their weights
weights.py    the matrices of the experts of a layer, and what becomes of gates and ups
apply.py      the one call: who computes, and what is added behind
reference.py  the specification: every row by itself
sorting.py    rows sorted by expert, and back
ragged.py     rows sorted by expert and `jax.lax.ragged_dot`, on accelerators
tiles.py      rows sorted by expert in tiles of one expert each, on CPUs: a loop over those that there are
cpu/          the kernel that reads packed experts
"""

from jpaged.kernels.experts.apply import ExpertsBackend, apply_experts
from jpaged.kernels.experts.routing import Routes, Routing, route
from jpaged.kernels.experts.weights import ExpertWeights, Gate

__all__ = ["ExpertWeights", "ExpertsBackend", "Gate", "Routes", "Routing", "apply_experts", "route"]
