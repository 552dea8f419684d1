"""Rotary position embedding.

config.py  the base, and how it is stretched, as a checkpoint describes it
angles.py  cosines and sines of positions, and the rotation
"""
