"""Policy: who runs, in which blocks, and what comes of it. Plain Python and numpy; never imports jax.

engine.py      what any thread may ask of it
loop.py        schedule, dispatch, collect, publish; who is in flight
loop_thread.py the thread that the loop runs on
executor.py    what the engine asks of a device: the shapes of a step, and its verbs
buckets.py     the closed list of shapes that programs are compiled for
sequence.py    one request's life: a group, and its sequences
deadlines.py   when requests have to end
soundness.py   requests whose logits are not finite
tokenizer.py   what the engine asks of a tokenizer
stats.py       counts of what the engine did
histogram.py   counts of durations
scheduling/    who runs in the next step
kv/            the blocks that they run in
output/        sampled tokens -> text, stops, events
data_parallel/ several engines behind one set of verbs
"""
