"""Products of rows with matrices that were packed when the model was loaded, on CPUs.

packed.py   a matrix in the order in which the kernel reads it
multiply.py the calls, and whether there is a kernel for them
cpu/        the kernel

XLA's own `dot_general` (`jpaged.models.matmul`) is the specification, and what runs everywhere else.
"""

from jpaged.kernels.product.multiply import Norm, ProductKernel, kernel, loaded
from jpaged.kernels.product.packed import PackedMatrix, Packer

__all__ = ["Norm", "PackedMatrix", "Packer", "ProductKernel", "kernel", "loaded"]
