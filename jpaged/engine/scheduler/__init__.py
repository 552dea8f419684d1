"""The scheduler: which rows run in the next step, on how many tokens, and which groups are preempted.

scheduler.py          the decision of one step; queues of groups; first come, first served
policies.py           other scheduling policies: priority, fairness over tenants
decode_batch.py       persistent decode batch: arrays of the decoding rows, updated incrementally
logits_processors.py  rows with logits processors, and the device slots of their token counts
aux_inputs.py         aux outputs of a step: log-probabilities and hidden states
multi_step.py         number of decode steps in one dispatch
output.py             the decided step, and its conversion to padded arrays
cascade.py            cascade attention: finds rows with a common prefix, which is read once
"""
