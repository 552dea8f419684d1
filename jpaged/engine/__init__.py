"""Engine policy: scheduling, KV cache management and output processing. Plain Python and numpy; never imports jax.

engine.py             thread-safe front end of the engine, and the thread that runs its loop; garbage collection
core.py               the step loop: schedule, dispatch, collect, publish; admission of requests, deadlines
runners.py            starts of a batch, one runner for each kind of schedule
results.py            results of a batch: tokens to sequences, ends of requests
lora.py               LoRA slots of the device: which adapter is in which slot
executor/             interface of a device: the shapes of a step, and the executor's methods
sequence.py           one request: a group and its sequences
observers.py          callbacks of the features that observe steps
tokenizer.py          tokenizer interface
structured_output.py  structured output: grammar masks and forced tokens
deadlines.py          deadlines of requests: expiry, and refusal of those that cannot be met
stats.py              counters and histograms of the engine
inspector.py          snapshots of the KV pool for the dashboard
scheduler/            the scheduler: which rows run in the next step
kv_cache/             KV cache: blocks, prefix cache, offload tiers
output/               sampled tokens -> text, stops, events
data_parallel.py      several engine replicas with the interface of one
speculative/          speculative decoding: draft proposers and verification
"""
