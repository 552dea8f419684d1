"""The scheduler: which rows run in the next step, on how many tokens, and which groups are preempted.

scheduler.py       the decision of one step; queues of groups; first come, first served
policies.py        other scheduling policies: priority, fairness over tenants
rows.py            persistent decode batch: arrays of the decoding rows, updated incrementally
editing.py         rows with logits processors, and the device slots of their token counts
tells.py           aux outputs of a step: log-probabilities and hidden states
lookahead.py       number of decode steps in one dispatch
schedule.py        the decided step, and its conversion to padded arrays
shared_prefixes.py cascade attention: finds rows with a common prefix, which is read once
"""
