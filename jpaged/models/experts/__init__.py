"""Mixtures of experts in place of a feed-forward.

mixture.py  what a family says of its experts
reading.py  what families read of a config.json in the same words
modules.py  the router, the experts, and those that all rows share
leaves.py   the leaves of their parameters, under the names that a family's checkpoints have for them
"""
