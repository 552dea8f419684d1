"""Policy: who runs, in which blocks, and what comes of it. Plain Python and numpy; never imports jax.

engine.py      what any thread may ask of it, and the thread of the loop
loop.py        schedule, dispatch, collect, publish; who is in flight, and until when
dispatches.py  what is under way
turns.py       several steps between which masks are made
adapters.py    which adapter (LoRA) is in which slot of the device
executor/      what the engine asks of a device: the shapes of a step, and its verbs
reach.py       how far the layers of a KV group see, in blocks
cascade_costs.py what reading a prefix once for several rows costs
sequence.py    one request's life: a group, and its sequences
garbage.py     Python's own collector, kept out of the steps
tokenizer.py   what the engine asks of a tokenizer
grammars.py    rows whose text follows a grammar
intake.py      what becomes of a step's results
soundness.py   rows whose logits are not finite
stats.py       counts of what the engine did, and how long it took
scheduling/    who runs in the next step
watching/      what somebody who watches the pool is shown
kv/            the blocks that they run in
output/        sampled tokens -> text, stops, events
data_parallel/ several engines behind one set of verbs
speculation/   tokens that are proposed ahead of the model
"""
