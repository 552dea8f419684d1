"""Rounds of a draft model on the device: it proposes and the model verifies in the same dispatch.

rounds.py       interface for the engine
"""
