"""The scheduler: which rows run in the next step, on how many tokens, and which groups are preempted.

scheduler.py       the decision of one step
queues.py          queues of groups: waiting, running, swapped out
policies.py        scheduling policies: order of admission and preemption
rows.py            persistent decode batch: arrays of the decoding rows, updated incrementally
editing.py         rows with logits processors, and the device slots of their token counts
tells.py           aux outputs of a step: log-probabilities and hidden states
told_budget.py     limit of the prompt tokens with aux outputs in a step
cohorts.py         aligns beam searches of several requests into the same steps
pace.py            limit of the prefill tokens in a step, for a bound on inter-token latency
lookahead.py       number of decode steps in one dispatch
preemption.py      preemption by recompute or swap
schedule.py        the decided step, and its conversion to padded arrays
scheduled.py       parts of a step: rows, their drafts, runs of rows that share a prefix
shared_prefixes.py cascade attention: finds rows with a common prefix, which is read once
"""
