"""Benchmarks of servers from the client's side, without jax or an engine. The command line is `jpaged.cli.bench`.

datasets.py        requests to send
vocabulary.py      tokens that random prompts consist of
arrivals.py        send times
drive.py           sends requests and times the responses
trace.py           times of one request
grpc_backend.py    jpaged servers
openai_backend.py  servers with OpenAI's HTTP API
metrics.py         times -> vLLM's metrics
limits.py          hardware limits
machine.py         machine and versions
results.py         result files
compare.py         comparison of two result files
plot.py            plots of a sweep
"""
