"""How the demo model is made: the stories that it learns from and its training.

train.py      the training, from nothing to a checkpoint
distil.py     the training of its draft model, from what it writes
acceptance.py how often the draft model guesses right
saving.py     parameters -> a checkpoint
data.py       stories -> batches of tokens
tokenizer.py  the tokenizer of the stories' words
attention.py  dense attention with a gradient
muon.py       the optimizer
sample.py     a plain sampler, apart from the engine
stories/      the grammar that tells them
"""
