"""LoRA matmuls: the delta of each row's own adapter to a matmul.

reference.py  a matrix with its adapters; the specification and the default: one masked matmul with all adapters
cpu/          the kernel that reads only adapters in use
"""

from jpaged.kernels.lora.cpu import loaded
from jpaged.kernels.lora.reference import AdaptedMatrix, EmbeddingAdapters, adapt, joined_vectors, scaled

__all__ = ["AdaptedMatrix", "EmbeddingAdapters", "adapt", "joined_vectors", "loaded", "scaled"]
