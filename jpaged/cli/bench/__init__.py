"""The subcommand `bench`: one module a benchmark.

command.py     the list of them
serve.py       bench serve
servers.py     the server that it measures
throughput.py  bench throughput
latency.py     bench latency
offline.py     the LLM that these two measure
startup.py     bench startup
compare.py     bench compare
probe.py       bench probe
kernels.py     bench kernels
simulate.py    bench simulate
fleet.py       bench fleet
flags.py       flags that several have
report.py      tables on the terminal
"""
