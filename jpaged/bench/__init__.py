"""Benchmarks of servers from the client's side, without jax or an engine. An optional part.

datasets.py        requests to send, and the vocabulary of random prompts
load_generator.py  send times; sends requests and times the responses
backends.py        jpaged servers, and servers with OpenAI's HTTP API
metrics.py         times of requests -> vLLM's metrics
limits.py          hardware limits
results.py         result files: conditions, comparison, plots
cli/               the command: one module per benchmark, some of them of an `LLM` or a simulator
"""
