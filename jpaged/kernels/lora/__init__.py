"""Adapters (LoRA): what each row's own adapter adds to the product of a row and a matrix.

adapted.py    a matrix with its adapters
reference.py  the specification, and what runs everywhere else: one product with all adapters, masked
cpu/          the kernel that reads the adapters that rows have
"""

from jpaged.kernels.lora.adapted import AdaptedMatrix
from jpaged.kernels.lora.cpu.lora import loaded
from jpaged.kernels.lora.reference import adapt

__all__ = ["AdaptedMatrix", "adapt", "loaded"]
