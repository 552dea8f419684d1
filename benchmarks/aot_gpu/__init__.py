"""Compiles programs for an H200 and other GPUs on a machine without one, and reads off what the compiler made of them.

`make aot-gpu`, or `python -m benchmarks.aot_gpu` where jax has its CUDA packages and nvdisasm (about 5 GB; no GPU is
needed). That is why this gate is a command of its own and no part of the tests.

cases.py          what is compiled
models.py         among it a step of every architecture
program.py        a lowered program, and what has to be true of it
copies.py         arrays that a program makes of its weights
assembler.py      what the assembler says of Triton's kernels
compile_case.py   one case, in a process of its own
judge.py          whether it is as it should be
sass.py           what the assembler made of our kernels
gate.py           and whether that is as good as before
"""
