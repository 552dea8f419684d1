"""Rotary position embedding.

config.py  the base, and its scaling, as a checkpoint describes them
angles.py  cosines and sines of positions, and the rotation
"""
