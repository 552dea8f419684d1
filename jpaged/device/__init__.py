"""Everything that holds a device array: parameters, the KV pool, compiled programs.

executor.py           the engine's executor: runs steps in the order of their dispatch
mesh.py               devices as a mesh, and the mesh axis of each logical axis
linear.py             choice of the matmul backend for the weights, and packing of weights for it
lora.py               LoRA adapter slots next to the weights
kv_scales.py          scales of 8-bit keys and values
block_port.py         exchange of blocks with other servers as device arrays
transfers.py          moves of whole blocks, and the pool of blocks in host memory
step_sizes.py         default step sizes
step.py               the programs of a step, and of several decode steps
model_runner.py       inputs of a call in one buffer, the pool between two calls, the calls, and copies to the host
logits_processors.py  changes of logits before a token is sampled
sampling.py           logits -> the next token of each row; the vocabulary as columns
context.py            contexts split over the devices of a mesh
sharded_matmul.py     matmuls with quantized matrices and experts split over devices
expert_balance.py     replicas of experts, and their moves between devices while steps run
device_info.py        the devices that JAX finds, and the available host memory
vision.py             the vision encoder: packed images -> input embeddings
step_costs.py         device rates, timed at startup, and costs of reading a shared prefix once
speculative/          draft models for speculative decoding
compilation/          compilation, caching and memory use of programs
aot/                  compilation for devices that are not attached
multihost/            one executor across several processes
"""
