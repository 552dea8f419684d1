"""The scheduler: which rows run in the next step, on how many tokens, and which groups are preempted.

scheduler.py          the decision of one step; queues of groups; first come, first served
policies.py           other scheduling policies: priority, fairness over tenants
decode_batch.py       persistent decode batch: arrays of the decoding rows, updated incrementally; LongRoPE
logits_processors.py  rows with logits processors, and the device slots of their token counts
multi_step.py         number of decode steps in one dispatch
output.py             the decided step with its aux outputs, and its conversion to padded arrays
cascade.py            cascade attention: finds rows with a common prefix, which is read once
"""
