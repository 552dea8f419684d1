"""Speculative decoding: draft tokens, and how many of them to propose.

drafter.py      asks the proposer for draft tokens, and reports the accepted ones to it
drafts.py       rows of a step that run draft tokens
draft_model.py  rounds of a draft model on the device
ngram.py        protocol of a proposer on the host; prompt lookup: what followed the same n-gram earlier in the sequence
suffix.py       suffix decoding: what followed in this sequence and in earlier outputs
controller.py   number of draft tokens for each row of a step, if any
"""
