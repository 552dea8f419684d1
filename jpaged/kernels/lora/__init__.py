"""LoRA matmuls: the delta of each row's own adapter to a matmul.

adapted.py    a matrix with its adapters
reference.py  the specification and the default: one masked matmul with all adapters
cpu/          the kernel that reads only adapters in use
"""

from jpaged.kernels.lora.adapted import AdaptedMatrix
from jpaged.kernels.lora.cpu.lora import loaded
from jpaged.kernels.lora.reference import adapt

__all__ = ["AdaptedMatrix", "adapt", "loaded"]
