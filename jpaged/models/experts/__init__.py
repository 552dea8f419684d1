"""Mixtures of experts in place of a feed-forward.

mixture.py  a family's choices of experts
reading.py  fields of config.json that families share
modules.py  the router, the experts, and the shared expert
leaves.py   the leaves of the parameters, under the names in a family's checkpoints
"""
