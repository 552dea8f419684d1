"""How the demo model is made: the stories that it learns from, its training, and its export.

train.py      the training, from nothing to a checkpoint
data.py       stories -> batches of tokens
tokenizer.py  the tokenizer of the stories' words
attention.py  dense attention with a gradient
muon.py       the optimizer
sample.py     a plain sampler, apart from the engine
export.py     the model in Hugging Face's format
stories/      the grammar that tells them
"""
