"""Operations on device arrays, one folder each; the XLA version of an operation is its specification.

attention_kind.py  the attention of a layer
mixture_kind.py    routing and gates of a mixture of experts
matrix_format.py   formats of quantized matrices
kv_layout.py       layout of keys and values in the pool
cuda_library.py    GPUs with kernels; the library of all CUDA kernels: its compilation, and the check that it fits
qkv_rope.py        splitting of the QKV projection, and RoPE, on TPUs
recurrence.py      states of recurrent layers, the short convolution, the delta rule and Mamba-2
experts/           mixtures of experts
lora/              LoRA matmuls with an adapter per row
paged_attention/   attention over blocks
matmul/            matmuls with matrices that are quantized, or packed for CPUs
cpu/               the library of all CPU kernels
sampling/          sampling of tokens from logits
"""
