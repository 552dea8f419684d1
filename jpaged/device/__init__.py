"""Everything that holds a device array: parameters, the KV pool, compiled programs.

executor.py      the engine's executor: runs steps in the order of their dispatch
here.py          what jax finds on this machine
mesh.py          devices as a mesh, and where each logical axis goes
linear.py        what multiplies with the weights, and the weights packed for it
adapters.py      adapter slots beside the weights
kv_scales.py     scales of keys and values in 8 bits
transfers.py     moves of whole blocks
host_pool.py     blocks in host memory
identity.py      what the bytes of a block depend on
host_memory.py   host memory that this process may still have
calibration.py   what the device does in a second, timed at the start
cascade_costs.py what reading a shared prefix once costs
step_sizes.py    sizes of a step that nobody chose
step/            the programs of a step
speculation/     a draft model that proposes tokens
programs/        how they are compiled, kept, and what memory they take
aot/             devices that are not here
multihost/       one executor in several processes
"""
