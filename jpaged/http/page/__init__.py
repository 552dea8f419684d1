"""The dashboard of the KV pool, updated ten times a second, with a control to limit the pool.

dashboard.py  the paths; one snapshot of the pools for all viewers; limits of the pools for experiments
static/       the page: no build step, no external resources
"""
