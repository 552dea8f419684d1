"""`jpaged plan`: what a model needs on devices that are not here, and what it would do there.

target.py        a slice of TPUs or some GPUs
known_models/    the configurations of well-known models
cost.py          what a step reads and computes, and how long devices take for that
cycles.py        cycles of kernels, as counted: the nearest case of cycles.json
counted_times.py how long attention and sampling take by them
step_times.py    how long a planned step takes
named_model.py   the model that a plan is for
stored_model.py  what a step of a checkpoint costs, by its config
compiled.py      it, compiled for a target
process.py       each target in a child of its own
__main__.py      that child
estimate.py      what a deployment serves, and its price
roles.py         when prefill and decode are better apart
report.py        a plan in words and as JSON
simulator/       traces through the real engine in simulated time
fleet/           days on many replicas, the same way
"""
