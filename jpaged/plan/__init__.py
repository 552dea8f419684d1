"""`jpaged plan`: memory, speed and cost of a model on devices that are not present. An optional part.

known_models.py  configurations of well-known models
known_families.py what configurations of a family share
cost.py          roofline: bytes and FLOPs of a step, and the time that devices need for them
cycles.py        measured cycles of kernels (cycles.json), and the times from them
step_times.py    targets, and the duration of a planned step on them
compilation.py   the model of a plan, compiled for each target in a child process
__main__.py      that child process
estimate.py      throughput and price of a deployment; mixed or disaggregated prefill
report.py        a plan as text and as JSON
cli.py           the command
simulator/       traces through the real engine in simulated time
fleet/           simulated days on many replicas
"""
