"""The TPU kernel of sampling, in Pallas Mosaic.

sampling.py  the call, and what is prepared for it
kernel.py    the kernel
"""
