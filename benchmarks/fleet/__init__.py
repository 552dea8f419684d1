"""Fleets in simulation: days on a thousand replicas, and a few beside real processes.

__main__.py  what is run and recorded
page.py      the tables of docs/performance.md
check.py     the simulator beside servers of the small model, at 2 and 4 replicas
servers.py   those servers
drive.py     a day sent to them, routed as the simulator routes
probes.py    how long their steps take, with the others at work
"""
