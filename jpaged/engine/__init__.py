"""Engine policy: scheduling, KV cache management and output processing. Plain Python and numpy; never imports jax.

engine.py      thread-safe front end of the engine, and the thread that runs its loop; garbage collection
loop.py        the step loop: schedule, dispatch, collect, publish; admission of requests, deadlines
runners.py     starts of a batch, one runner for each kind of schedule
results.py     results of a batch: tokens to sequences, ends of requests
adapters.py    LoRA slots of the device: which adapter is in which slot
executor/      interface of a device: the shapes of a step, and the executor's methods
sequence.py    one request: a group and its sequences
observers.py   callbacks of the features that observe steps
tokenizer.py   tokenizer interface
grammars.py    structured output: grammar masks and forced tokens
stats.py       counters and histograms of the engine
watch.py       snapshots of the KV pool for the dashboard
deadlines.py   deadlines of requests, and lower bounds of their time
scheduling/    the scheduler: which rows run in the next step
kv/            KV cache: blocks, prefix cache, offload tiers
output/        sampled tokens -> text, stops, events
data_parallel/ several engine replicas with the interface of one
speculation/   speculative decoding: draft proposers and verification
"""
