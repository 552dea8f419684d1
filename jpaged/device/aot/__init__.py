"""Devices that are not attached, described well enough to compile for.

tpu.py         TPUs, through libtpu's topologies
gpu.py         GPUs, through XLA's own description; h200.txtpb is one
hlo.py         collectives of a compiled program
deployment.py  a server on such devices: its memory planned, its programs compiled
"""
