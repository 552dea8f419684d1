"""Serving in simulated time: the real engine above an executor that only moves a clock.

simulation.py  a trace through the engine
executor.py    the executor whose steps take time alone
trace.py       what arrives when: synthetic workloads
trace_file.py  traces of one's own
steady.py      what a trace shows between filling and draining
"""
