"""Models as pure functions over plain parameter trees, and families of them.

model.py        a model as its callers see it, and its parameter tree
tokens.py       packed tokens and their attributes
registry.py     architecture names -> families
family.py       the interface of a family
config.py       the shape of a model, its experts and its quantization
layer_kinds.py  kinds of layers, stretches in which kinds repeat, layers that share block tables
hf_config.py    that shape, read from a config.json and written to one
json_fields.py  a JSON object of which every key is read or refused
layers.py       the matmul, matrices, norms, projections, embeddings
stack.py        the loop over a stack of layers
sharding.py     how parameters are split over devices
param_specs.py  leaves of a parameter tree <-> tensors of a Hugging Face checkpoint; their quantized formats
rope.py         cosines and sines of positions, and the rotation
rope_config.py  the base of rotary positions, and its scaling, as a checkpoint describes them
lora.py         matrices that adapters apply to
decoder/        the decoder that most families use
families/       one file or folder per family
eagle/          EAGLE-3 heads, which propose tokens for a model
"""
