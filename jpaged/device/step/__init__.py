"""One step as two pure programs over packed inputs.

forward.py     the model over packed tokens, then the sampler over rows
decode.py      several decode steps in one program
feeding.py     the mask channel between the host and a running program
runner.py      inputs of a call in one buffer, the pool between two calls, and the calls
edits.py       logits processors
context.py     contexts split over the devices of a mesh
told.py        log-probabilities and hidden states in flight to the host
sampling.py    logits -> the next token of each row
experts.py     experts split over the devices of a mesh
products.py    quantized matrices split over devices, for matmuls in kernels
vocabulary.py  the vocabulary as columns, whole or split over devices
"""
