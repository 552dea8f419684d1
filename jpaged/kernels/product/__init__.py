"""Matmuls of rows with a model's matrices: quantized, or packed for CPUs at load time.

quantised.py a matrix of 8 or 4 bits with its scales, and XLA's matmuls with it
stacked.py   a matrix of one of several layers
on_device.py choice of the matmul for a device
depth.py     depths that XLA for GPUs would pad, and the parts that they are summed in
packed.py    a matrix in the order in which the CPU kernel reads it
scales.py    the codes and scales of such a matrix
multiply.py  the calls of that kernel, and the check for a library
cpu/         the kernel for CPUs
triton/      the kernel for GPUs: groups of rows, and numbers with scales per group
tpu/         the kernel for TPUs

XLA's own `dot_general` (`jpaged.models.matmul`) is the specification, and the fallback.
"""

from jpaged.kernels.product.multiply import Delta, Norm, ProductKernel, kernel, loaded
from jpaged.kernels.product.packed import PackedMatrix, Packer
from jpaged.kernels.product.quantised import QuantisedMatrix
from jpaged.kernels.product.scales import can_pack

__all__ = [
    "Delta",
    "Norm",
    "PackedMatrix",
    "Packer",
    "ProductKernel",
    "QuantisedMatrix",
    "can_pack",
    "kernel",
    "loaded",
]
