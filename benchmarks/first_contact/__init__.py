"""The first run on an accelerator: every check in a process with a time limit, and results that outlive a crash.

__main__.py   the command: run, pack or compare
checks.py     the table of checks, most valuable first
driver.py     runs the checks one after the other, each within its limit
child.py      the process of one check
cells.py      the lines of a check's cells; programs that compile on threads
summary.py    the results as text
compare.py    deviations of a run from the plan's estimates
estimates.py  the plan's estimates of what the cells measure
pack.py       source and packages for a machine without a network
device.py     check: packages, devices, memory
problem.py    an attention call with random numbers, and its oracle in NumPy
attention.py  check: attention kernels against the oracle
products.py   check: Triton kernels, quantized matmuls, experts and sampling
demo.py       check: tokens of the embedded model in every mode
speed.py      checks: dispatch, decode bandwidth, prefill FLOP/s
llama.py      check: steps of Llama 3 8B with random weights
serving.py    check: the gRPC server under load
"""
