"""One step as two pure programs over packed inputs.

forward.py     the model over packed tokens, then the sampler over rows
inputs.py      one host buffer for all small arrays of a call
sampling.py    logits -> the next token of each row
vocabulary.py  the vocabulary as columns, whole or split over devices
noise.py       random numbers as a function of seed, sequence and position
"""
