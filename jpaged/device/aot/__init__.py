"""Devices that are not attached, described well enough to compile for.

deployment.py  a server on such devices: its memory planned, its programs compiled, their collectives
topology.py    TPUs, through libtpu's topologies, and GPUs, through XLA's own description; h200.txtpb is one
"""
