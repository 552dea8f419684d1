"""Rounds of a draft model on the device: it proposes and the model verifies in the same dispatch.

rounds.py       interface for the engine
rule.py         number of rounds, if any
rows.py         rows scheduled for rounds
seen_blocks.py  blocks for which the draft model has KV
"""
