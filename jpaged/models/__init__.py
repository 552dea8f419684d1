"""Models as pure functions over plain parameter trees, and families of them.

model.py        what every model is to those who run it
tokens.py       what a token brings
registry.py     architecture names -> families
family.py       what a family is to the others
config.py       the shape of a model
layer_kinds.py  what a layer is, and the stretches in which kinds repeat
hf_config.py    that shape, read from a config.json and written to one
json_fields.py  a JSON object of which every key is read or refused
layers.py       matrices, norms, projections, embeddings
matmul.py       the matrix product, accumulated in float32
stack.py        the one way through a stack of layers
kv_groups.py    which layers share block tables
leaves.py       leaves of a parameter tree <-> tensors of a Hugging Face checkpoint
sharding.py     how parameters are split over devices
rope/           rotary position embedding
lora/           what adapters add to
decoder/        the decoder that most families are
families/       one file or room a family
heads/          EAGLE-3 heads, which propose tokens for a model
"""
