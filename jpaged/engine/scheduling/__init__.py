"""Who runs in the next step, on how many tokens, and who has to make room.

scheduler.py       the queues, and the decision of one step
policies.py        who comes first, and who yields to whom
rows.py            the rows that decode, as arrays that are edited
editing.py         rows whose logits are changed, and where their tokens are counted
tells.py           what is asked of a step besides its samples
told_budget.py     how many tokens of prompts a step may tell of
outgrowing.py      sequences that outgrow their keys, and begin again
cohorts.py         beams of several requests draw in the same steps
pace.py            as many tokens of prompts as streams can wait for
lookahead.py       how many decode steps one dispatch has
preemption.py      how a group leaves: recompute or swap
schedule.py        one step, decided, and the padded arrays that it becomes
shared_prefixes.py rows that begin with the same blocks read them once
"""
