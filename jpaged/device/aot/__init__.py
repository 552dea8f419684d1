"""Devices that are not here: described well enough to compile for.

tpu.py         TPUs, through libtpu's topologies
gpu.py         GPUs, through XLA's own description; h200.txtpb is one
hlo.py         what devices exchange in a compiled program
deployment.py  a server on such devices: its memory planned, its programs compiled
"""
