"""Rounds of a draft model on the device, which proposes where the model verifies.

rounds.py       what the engine asks of them
rule.py         whether there are any, and how many
rows.py         rows that are entered for them
seen_blocks.py  which blocks the draft has seen
"""
