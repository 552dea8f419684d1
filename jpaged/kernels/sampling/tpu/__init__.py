"""The TPU kernel of sampling, in Pallas Mosaic.

sampling.py  the call, and the preparation of the inputs
kernel.py    the kernel
"""
