"""`jpaged plan`: memory, speed and cost of a model on devices that are not present.

target.py        target devices: a TPU slice or some GPUs
known_models/    configurations of well-known models
cost.py          roofline: bytes and FLOPs of a step, and the time that devices need for them
cycles.py        measured cycles of kernels: the nearest case of cycles.json
counted_times.py times of attention and sampling from these cycles
step_times.py    duration of a planned step
named_model.py   the model that a plan is for
stored_model.py  cost of a checkpoint's step, from its config
compiled.py      a model compiled for a target
process.py       compilation of each target in a child process
__main__.py      that child process
estimate.py      throughput and price of a deployment
roles.py         comparison of mixed and disaggregated prefill and decode
report.py        a plan as text and as JSON
simulator/       traces through the real engine in simulated time
fleet/           simulated days on many replicas
"""
