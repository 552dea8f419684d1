"""Model families as pure functions over plain parameter trees.

model.py        what every model is to those who run it
registry.py     architecture names -> families
config.py       the shape of a model, read from a config.json
json_fields.py  a JSON object of which every key is read or refused
rope_config.py  rotary embedding as a checkpoint describes it
rope.py         rotary embedding, computed
layers.py       matrices, norms, projections
matmul.py       the matrix product, accumulated in float32
stack.py        the one way through a stack of layers
sharding.py     how parameters are split over devices
llama.py        the Llama family
opt.py          the OPT family
"""
