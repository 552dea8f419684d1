"""Models as pure functions over plain parameter trees, and families of them.

model.py        a model as its callers see it
tokens.py       packed tokens and their attributes
registry.py     architecture names -> families
family.py       the interface of a family
config.py       the shape of a model
layer_kinds.py  kinds of layers, and the stretches of a stack in which kinds repeat
hf_config.py    that shape, read from a config.json and written to one
json_fields.py  a JSON object of which every key is read or refused
layers.py       matrices, norms, projections, embeddings
matmul.py       the matmul, accumulated in float32
stack.py        the loop over a stack of layers
kv_groups.py    layers that share block tables
leaves.py       leaves of a parameter tree <-> tensors of a Hugging Face checkpoint
sharding.py     how parameters are split over devices
rope/           rotary position embedding
lora/           matrices that adapters apply to
decoder/        the decoder that most families use
families/       one file or folder per family
heads/          EAGLE-3 heads, which propose tokens for a model
"""
