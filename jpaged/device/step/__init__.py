"""One step as two pure programs over packed inputs.

forward.py     the model over packed tokens, then the sampler over rows
decode.py      the two again and again, in one program
feeding.py     what host and program tell each other while it runs
runner.py      what a call takes in one buffer, the pool between two calls, and the calls
edits.py       logits that are changed before a token is sampled
context.py     contexts over the devices of a mesh
told.py        what tells gave, on its way to the host
sampling.py    logits -> the next token of each row
experts.py     experts over the devices of a mesh
products.py    quantised matrices over them, where a kernel multiplies
vocabulary.py  the vocabulary as columns, whole or split over devices
"""
