"""Serving in simulated time: the real engine with an executor that only advances a clock.

simulation.py  a trace through the engine: executor, results, steady state
deployment.py  models, and one on devices with a pool: duration of steps, copies and swaps
trace.py       arrivals and lengths: synthetic workloads, or a file
"""
