"""Products of rows with a model's matrices: quantised, or packed for CPUs when the model was loaded.

quantised.py a matrix of 8 or 4 bits with its scales, and XLA's products with it
stacked.py   a matrix of one of several layers
on_device.py whose product with it runs where
depth.py     depths that XLA for GPUs would pad, and the parts that they are summed in
packed.py    a matrix in the order in which the CPU kernel reads it
scales.py    what such a matrix has beside numbers, and its codes
multiply.py  the calls of that kernel, and whether there is one
cpu/         the kernel
triton/      the kernel of GPUs: groups of rows, and numbers that share scales in groups
tpu/         that of TPUs

XLA's own `dot_general` (`jpaged.models.matmul`) is the specification, and what runs everywhere else.
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
