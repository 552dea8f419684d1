"""Tokens that are proposed ahead of the model, and how many of them.

drafting.py     what is proposed for a step, and what came of it
drafts.py       the rows of a step that run what is proposed
rounds/         rounds of a draft model on the device
proposer.py     what the scheduler asks of whoever proposes on the host
methods.py      the proposer that the options name
ngram.py        prompt lookup: what followed the same n-gram earlier in the sequence
suffix.py       suffix decoding: what came next here and in earlier outputs
suffix_tree.py  a tree of suffixes with counts
shared_texts.py earlier outputs of those who share, within bounds
adaptation.py   how many tokens to propose for each row of a step, and whether any
acceptance.py   how likely proposals are accepted
costs.py        what a step with proposals takes
verification.py which proposals a step accepts
stats.py        counts under vLLM's names
"""
