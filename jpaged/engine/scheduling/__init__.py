"""Who runs in the next step, on how many tokens, and who has to make room.

scheduler.py       the decision of one step
queues.py          where groups are: waiting, running, swapped out
policies.py        who comes first, and who yields to whom
rows.py            the rows that decode, as arrays that are edited
editing.py         rows whose logits are changed, and where their tokens are counted
tells.py           what is asked of a step besides its samples
told_budget.py     how many tokens of prompts a step may tell of
cohorts.py         beams of several requests draw in the same steps
pace.py            as many tokens of prompts as streams can wait for
lookahead.py       how many decode steps one dispatch has
preemption.py      how a group leaves: recompute or swap
schedule.py        one step, decided, and the padded arrays that it becomes
scheduled.py       what it is made of: rows, drafts behind them, runs that read together
shared_prefixes.py rows that begin with the same blocks read them once
"""
