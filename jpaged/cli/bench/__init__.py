"""The subcommand `bench`: one module per benchmark.

command.py     the list of benchmarks
serve.py       bench serve
servers.py     the server that `bench serve` measures
throughput.py  bench throughput
latency.py     bench latency
offline.py     the LLM that these two measure
startup.py     bench startup
compare.py     bench compare
probe.py       bench probe
kernels.py     bench kernels
simulate.py    bench simulate
fleet.py       bench fleet
flags.py       flags and result tables shared by several benchmarks
"""
