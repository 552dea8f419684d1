"""Everything that holds a device array: parameters, the KV pool, compiled programs.

executor.py      the engine's executor: runs steps in the order of their dispatch
here.py          the devices that JAX finds on this machine
mesh.py          devices as a mesh, and the mesh axis of each logical axis
linear.py        choice of the matmul backend for the weights, and packing of weights for it
adapters.py      LoRA adapter slots next to the weights
kv_scales.py     scales of 8-bit keys and values
transfers.py     copies and swaps of whole blocks
host_pool.py     blocks in host memory
identity.py      digest of everything that the bytes of a KV block depend on
host_memory.py   host memory that is available to this process
calibration.py   device rates, timed at startup
cascade_costs.py costs of reading a shared prefix once
step_sizes.py    default step sizes
step/            the programs of a step
speculation/     draft models for speculative decoding
programs/        compilation, caching and memory use of programs
aot/             compilation for devices that are not attached
multihost/       one executor across several processes
"""
