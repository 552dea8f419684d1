"""Who runs in the next step, on how many tokens, and who has to make room.

scheduler.py       the queues, and the decision of one step
policies.py        the order of admission, and who yields first
preemption.py      how a group leaves: recompute or swap
schedule.py        one step, decided
shared_prefixes.py rows that begin with the same blocks read them once
batch.py           a schedule -> padded arrays
"""
