"""The embedded model.

checkpoint.py  where it lies, and how it is read and written
"""
