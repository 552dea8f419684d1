"""Operations on device arrays, one folder each; the XLA version of an operation is its specification.

attention_kind.py  what attention computes in a layer
mixture_kind.py    how a mixture of experts chooses among them
matrix_format.py   how a matrix is quantised
kv_layout.py       where keys and values lie in the pool
lowered_device.py  which device a program is lowered for
triton_compiler.py whether jax has Pallas Triton
experts/           mixtures of experts
heads/             queries, keys and values out of one projection
lora/              what each row's own adapter adds to a product
paged_attention/   attention over blocks
product/           products with matrices that are quantised, or packed for CPUs
cpu/               the library of all CPU kernels
sampling/          tokens from logits
"""
