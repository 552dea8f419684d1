"""The dashboard of the KV pool, updated ten times a second, with a control to limit the pool.

hub.py    one snapshot of the pools for all viewers, and the frames for each
paths.py  /, and below /page/
limits.py makes the pools smaller for experiments
static/   the page: no build step, no external resources
"""
