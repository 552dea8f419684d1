"""Matmuls of rows with a model's matrices: quantized, or packed for CPUs at load time.

quantized.py  a matrix of 8 or 4 bits with its scales, alone or of one of several layers, and XLA's matmuls with it
on_device.py  choice of the matmul for a device, and of the parts of a depth that XLA for GPUs would pad
packed.py     a matrix, its codes and scales in the order in which the CPU kernel reads them
multiply.py   the calls of that kernel, and the check for a library
tpu.py        the kernel for TPUs, and its calls
cpu/          the kernel for CPUs: core.cc has the arithmetic, kernel.cc the tasks, stored.cc packs blocks of files
triton/       the kernel for GPUs: groups of rows, and numbers with scales per group; and its calls
cuda/         the same for a jax without Pallas Triton, in CUDA C++

XLA's own `dot_general` (`jpaged.models.layers`) is the specification, and the fallback.
"""

from jpaged.kernels.matmul.multiply import GATES, Gate, Norm, ProductKernel, RowDelta, kernel, loaded, scale_operands
from jpaged.kernels.matmul.packed import PackedMatrix, Packer, StoredColumns, can_pack, can_pack_experts, swap_experts
from jpaged.kernels.matmul.quantized import QuantizedMatrix

__all__ = [
    "GATES",
    "Gate",
    "Norm",
    "PackedMatrix",
    "Packer",
    "ProductKernel",
    "QuantizedMatrix",
    "RowDelta",
    "StoredColumns",
    "can_pack",
    "can_pack_experts",
    "kernel",
    "loaded",
    "scale_operands",
    "swap_experts",
]
