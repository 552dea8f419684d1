"""Serving in simulated time: the real engine above an executor that only moves a clock.

simulation.py  a trace through the engine
executor.py    the executor whose steps take time alone
deployment.py  a model on devices with a pool: what steps, copies and swaps take
models.py      the models, those of the paper as it served them
trace.py       what arrives when: synthetic workloads
trace_file.py  traces of one's own
steady.py      what a trace shows between filling and draining
"""
