"""Serving in simulated time: the real engine with an executor that only advances a clock.

simulation.py  a trace through the engine
executor.py    the executor whose steps only take time
deployment.py  a model on devices with a pool: duration of steps, copies and swaps
models.py      the models, including the paper's as it served them
trace.py       synthetic workloads: arrivals and lengths
trace_file.py  traces from a file
steady.py      the steady state of a trace, between filling and draining
"""
