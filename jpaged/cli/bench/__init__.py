"""The subcommand `bench`: one module a benchmark.

command.py   the list of them
kernels.py   bench kernels
simulate.py  bench simulate
"""
